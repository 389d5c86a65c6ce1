"""OpenTelemetry spans in OTLP's JSON, as Megatron-core's telemetry exports them: `megatron.microbatch.forward` and
`.backward`, with `dl.pipeline_parallel.rank` and a microbatch. Must not contain: other formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.traces.events import Event, RankEvents
from pipeflow.traces.values import mapping, objects, text

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
                found.setdefault(rank, empty).ranges.extend(_events(span, given))
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


def _events(span: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Event]:
    """The event of a span; none if it has no times."""
    name, microbatch = text(span.get("name")), _number(given, *MICROBATCHES)
    if name in WORDS:
        word = WORDS[name]
        name = f"{word.lower()}_step" if microbatch is None else f"{word} {microbatch}"
    start, end = (_number(span, key) for key in ("startTimeUnixNano", "endTimeUnixNano"))
    if start is not None and end is not None:
        yield Event(name, 1e-9 * start, 1e-9 * end)
