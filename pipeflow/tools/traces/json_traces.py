"""Traces in JSON: Chrome traces, as torch.profiler writes them, and OpenTelemetry spans in OTLP's JSON, as
Megatron-core's telemetry exports them: `megatron.microbatch.forward` and `.backward`, with `dl.pipeline_parallel.rank`
and a microbatch. Must not contain: what annotations mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.tools.traces.events import (
    Event,
    Exchange,
    RankEvents,
    count,
    is_exchange,
    mapping,
    objects,
    seconds,
    text,
)

BACKWARD = "autograd::engine::evaluate_function: "
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
BEFORE = {  # categories as torch wrote them before 1.12
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
    "Operator": "cpu_op",
}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
MOST = 2_000_000  # events of a file, so that none can fill the memory
CALL = "c10d::"  # beginning of the names of calls that exchange tensors
SENDS, RECEIVES = "c10d::send", "c10d::recv"  # beginnings of those between two ranks
TRANSFERS = ("nccl", "gloo:", "mpi:", "ucc:")  # beginnings of names of what these start, which runs beside the host
LONG = 1e-4  # seconds that a call of a device takes if it waits
ANNOTATIONS = ("user_annotation", "")  # categories of annotations
WORK = re.compile(r"(?!_?c10d|autograd::|torch::autograd::)\w+::")  # names of operators that compute, as "aten::mm"


def read_chrome(whole: str, source: str) -> RankEvents:
    """The events of a trace: an object with `traceEvents`, or the list of them alone. Of a file that is cut off, what
    is there.
    """
    reader = _Reader(whole)
    found = collected(reader.events(), source)
    head = reader.head()
    group = mapping(head.get("distributedInfo"))
    found.rank, found.ranks = count(group.get("rank")), count(group.get("world_size"))
    found.pipeline = _pipeline(group, found.rank)
    if len(groups := objects(group, "pg_config")) == 1:
        found.group = str(groups[0].get("ranks") or "")
    found.host = text(head.get("host_name"))
    found.is_cut_off = reader.is_cut_off
    base = seconds(head.get("baseTimeNanoseconds"), 1e-9)
    return _since(found, base) if base else found


def collected(raw_events: Iterable[Mapping[str, Any]], source: str) -> RankEvents:
    """The events of one rank, sorted into kinds. Events that have no time are left out. Raises UsageError for more
    than MOST.
    """
    found = RankEvents(source)
    launches: dict[object, float] = {}
    device: list[tuple[str, Event, dict[str, Any]]] = []
    for number, raw in enumerate(raw_events):
        if number == MOST:
            raise UsageError(f"{source}: this has more than {MOST} events: record fewer steps")
        start, lasted = seconds(raw.get("ts"), 1e-6), seconds(raw.get("dur", 0), 1e-6)
        if raw.get("ph") != "X":
            continue
        if start is None or lasted is None or lasted < 0:
            found.timeless += 1
            continue
        category, name, given = text(raw.get("cat")), text(raw.get("name")), mapping(raw.get("args"))
        category = BEFORE.get(category, category)
        event = Event(name, start, start + lasted, count(given.get("Sequence number")))
        if category in LAUNCHES:
            launches[count(given.get("correlation"))] = start
            found.calls += [event] * (lasted > LONG)
        elif category in DEVICE:
            device.append((category, event, given))
        elif name.startswith(CALL):
            calls = {SENDS: found.sends, RECEIVES: found.receives}
            next((own for start, own in calls.items() if name.startswith(start)), found.collectives).append(event)
        elif name.startswith(TRANSFERS):
            found.started += [event] * (category != "gpu_user_annotation")
        elif category == "cpu_op" and name.startswith(BACKWARD):
            found.backwards.append(event)
        elif category == "cpu_op" and event.number is not None:
            found.operators += [event] * (not given.get("Fwd thread id"))
        elif category != "gpu_user_annotation":
            found.ranges.append(event)
            found.annotations += [event] * (category in ANNOTATIONS and not WORK.match(name))
        if category in ("cpu_op", "") and WORK.match(name):
            found.work.append(event)
    found.launches = len(launches)
    for category, event, given in device:
        launched = launches.get(count(given.get("correlation")), event.start)
        found.devices.add(count(given.get("device")))
        if is_exchange(event.name):
            called, group = (text(given.get(key)) for key in ("Collective name", "Process Group Ranks"))
            found.exchanges.append(Exchange(event, launched, called, group or text(given.get("Process Group Name"))))
        else:
            found.kernels.append((launched, event))
            found.copies += [(launched, event)] * (category != "kernel")
    return found


def _pipeline(group: dict[str, Any], rank: object) -> tuple[int, ...]:
    """The ranks of the pipeline of `rank`, from the descriptions of process groups: "mesh_pp" of a DeviceMesh, or
    Megatron's "PIPELINE_MODEL_PARALLEL_GROUP".
    """
    for each in objects(group, "pg_config"):
        name, ranks = text(each.get("pg_desc")).lower(), each.get("ranks")
        ranks = ranks if isinstance(ranks, list) and all(count(one) is not None for one in ranks) else []
        if rank in ranks and (name.endswith("_pp") or name in ("pp", "pipeline_model_parallel_group")):
            return tuple(dict.fromkeys(ranks))
    return ()


def _since(found: RankEvents, base: float) -> RankEvents:
    """The events on the clock of the machine: files count from a `base` of their own."""

    def moved(event: Event) -> Event:
        return event._replace(start=event.start + base, end=event.end + base)

    for events in (found.ranges, found.operators, found.backwards, found.sends, found.receives, found.collectives):
        events[:] = map(moved, events)
    for others in (found.started, found.work, found.annotations, found.calls):
        others[:] = map(moved, others)
    for launched_events in (found.kernels, found.copies):
        launched_events[:] = [(launched + base, moved(event)) for launched, event in launched_events]
    found.exchanges = [
        each._replace(event=moved(each.event), launched=each.launched + base) for each in found.exchanges
    ]
    return found


_BETWEEN = re.compile(r"[ \n\r\t,]*")


class _Reader:
    """Reads one event after the other, so that a large file needs little memory beside its text."""

    def __init__(self, whole: str) -> None:
        self._text = whole
        self.is_cut_off = False
        key = whole.find('"traceEvents"')
        self._start = whole.find("[", max(key, 0))
        self._head = whole[: max(key, 0)]
        self._tail = ""

    def events(self) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        whole, place = self._text, self._start + 1
        while True:
            place = _BETWEEN.match(whole, place).end()  # type: ignore[union-attr]  # it matches everywhere
            if whole[place : place + 1] == "]":
                self._tail = whole[place + 1 :]
                return
            try:
                event, place = decode(whole, place)
            except (ValueError, RecursionError):
                self.is_cut_off = True
                return
            if isinstance(event, dict):
                yield event

    def head(self) -> dict[str, Any]:
        """The fields of the file beside its events, as far as they can be read."""
        found: dict[str, Any] = {}
        for part in (self._head.rstrip().rstrip(",") + "}", "{" + self._tail.lstrip().lstrip(",")):
            try:
                read = json.loads(part)
            except (ValueError, RecursionError):
                continue
            found |= mapping(read)
        return found


RANKS = ("dl.pipeline_parallel.rank", "dl.rank")  # attributes of a span or of its resource
MICROBATCHES = ("dl.microbatch_id", "megatron.microbatch_id")
WORDS = {"megatron.microbatch.forward": "Forward", "megatron.microbatch.backward": "Backward"}


def read_otlp(whole: str, source: str) -> list[RankEvents]:
    """The events of each pipeline rank in a file with one JSON object, or one in each line. Of several processes with
    the same pipeline rank, such as tensor ranks, the first one counts. Raises UsageError for spans without a rank.
    """
    found: dict[int, RankEvents] = {}
    owners: dict[int, object] = {}
    for resource in _resources(whole):
        shared = _attributes(mapping(resource.get("resource")))
        process = shared.get("dl.rank", shared.get("service.instance.id"))
        for span in (span for scope in objects(resource, "scopeSpans") for span in objects(scope, "spans")):
            given = shared | _attributes(span)
            rank = _number(given, *RANKS)
            if rank is None:
                raise UsageError(
                    f"{source}: its spans have none of the attributes {', '.join(RANKS)}, which say the rank"
                )
            if owners.setdefault(rank, process) == process:
                empty = RankEvents(
                    source, rank, _number(shared, "dl.pipeline_parallel.size"), text(shared.get("host.name"))
                )
                found.setdefault(rank, empty).ranges.extend(_events_of_span(span, given))
    if not found:
        raise UsageError(f"{source}: it has no spans: export those of all pipeline ranks, with their microbatches")
    return [found[rank] for rank in sorted(found)]


def _resources(whole: str) -> Iterator[dict[str, Any]]:
    try:
        read = [json.loads(whole)]
    except (ValueError, RecursionError):  # a line that is cut off ends the file
        read = []
        with suppress(ValueError, RecursionError):
            read += map(json.loads, whole.splitlines())
    for each in read:
        yield from objects(each, "resourceSpans")


def _attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as plain values: OTLP wraps each in an object that says its type."""
    wrapped = ((text(each.get("key")), mapping(each.get("value"))) for each in objects(holder, "attributes"))
    return {key: next(iter(value.values()), None) for key, value in wrapped}


def _number(given: Mapping[str, Any], *keys: str) -> int | None:
    """The first number under these keys; OTLP's JSON has large ones as texts."""
    texts = (str(given.get(key)) for key in keys)
    return next((int(each) for each in texts if each.isdecimal() and len(each) < 20), None)


def _events_of_span(span: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Event]:
    """The event of a span; none if it has no times."""
    name, microbatch = text(span.get("name")), _number(given, *MICROBATCHES)
    if name in WORDS:
        word = WORDS[name]
        name = f"{word.lower()}_step" if microbatch is None else f"{word} {microbatch}"
    start, end = (_number(span, key) for key in ("startTimeUnixNano", "endTimeUnixNano"))
    if start is not None and end is not None:
        yield Event(name, 1e-9 * start, 1e-9 * end)
