"""Chrome traces, as torch.profiler writes them. Must not contain: what annotations mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipeflow.traces.events import Event, RankEvents

BACKWARD = "autograd::engine::evaluate_function: "
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
CALL = "c10d::"  # beginning of the names of calls that send or receive
TRANSFERS = ("nccl", "gloo:", "mpi:", "ucc:")  # beginnings of names of what these start, which runs beside the host


def read_chrome(text: str, source: str) -> RankEvents:
    """The events of a trace: an object with `traceEvents`, or the list of them alone. Of a file that is cut off, what
    is there.
    """
    found = RankEvents(source)
    launches: dict[object, float] = {}
    device: list[tuple[object, Event]] = []
    base = 0.0
    reader = _Reader(text)
    for raw in reader.events():
        if raw.get("ph") != "X" or not isinstance(raw.get("ts"), int | float):
            continue
        category, name, given = raw.get("cat", ""), str(raw.get("name", "")), raw.get("args") or {}
        start = float(raw["ts"]) * 1e-6
        event = Event(name, start, start + float(raw.get("dur") or 0) * 1e-6, given.get("Sequence number"))
        if category in LAUNCHES:
            launches[given.get("correlation")] = start
        elif category in DEVICE:
            device.append((given.get("correlation"), event))
        elif name.startswith(CALL):
            found.messages.append(event)
        elif name.startswith(TRANSFERS):
            continue
        elif category == "cpu_op" and name.startswith(BACKWARD):
            found.backwards.append(event)
        elif category == "cpu_op" and event.number is not None:
            found.operators += [event] * (not given.get("Fwd thread id"))
        elif category != "gpu_user_annotation":
            found.ranges.append(event)
    found.kernels = [
        (launches.get(number, event.start), event) for number, event in device if not event.name.startswith("nccl")
    ]
    head = reader.head()
    group = head.get("distributedInfo") or {}
    found.rank, found.ranks = group.get("rank"), group.get("world_size")
    found.pipeline = _pipeline(group, found.rank)
    found.host, base = str(head.get("host_name", "")), float(head.get("baseTimeNanoseconds") or 0) * 1e-9
    found.is_cut_off = reader.is_cut_off
    return _since(found, base)


def _pipeline(group: dict[str, Any], rank: object) -> tuple[int, ...]:
    """The ranks of the pipeline of `rank`, from the descriptions of process groups: "mesh_pp" of a DeviceMesh, or
    Megatron's "PIPELINE_MODEL_PARALLEL_GROUP".
    """
    for each in group.get("pg_config") or []:
        name, ranks = str(each.get("pg_desc", "")).lower(), each.get("ranks") or []
        if rank in ranks and (name.endswith("_pp") or name in ("pp", "pipeline_model_parallel_group")):
            return tuple(ranks)
    return ()


def _since(found: RankEvents, base: float) -> RankEvents:
    """The events on the clock of the machine: files count from a `base` of their own."""
    if base:

        def moved(event: Event) -> Event:
            return event._replace(start=event.start + base, end=event.end + base)

        for events in (found.ranges, found.operators, found.backwards, found.messages):
            events[:] = map(moved, events)
        found.kernels = [(launched + base, moved(event)) for launched, event in found.kernels]
    return found


class _Reader:
    """Reads one event after the other, so that a large file needs little memory beside its text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_cut_off = False
        key = text.find('"traceEvents"')
        self._start = text.find("[", max(key, 0))
        self._head = text[: max(key, 0)]
        self._tail = ""

    def events(self) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        text, place = self.text, self._start + 1
        while True:
            while text[place : place + 1] in (" ", "\n", "\r", "\t", ","):
                place += 1
            if text[place : place + 1] == "]":
                self._tail = text[place + 1 :]
                return
            try:
                event, place = decode(text, place)
            except ValueError:
                self.is_cut_off = True
                return
            if isinstance(event, dict):
                yield event

    def head(self) -> dict[str, Any]:
        """What stands beside the events in the file; what of it can be read."""
        found: dict[str, Any] = {}
        for part in (self._head.rstrip().rstrip(",") + "}", "{" + self._tail.lstrip().lstrip(",")):
            try:
                read = json.loads(part)
            except ValueError:
                continue
            found |= read if isinstance(read, dict) else {}
        return found
