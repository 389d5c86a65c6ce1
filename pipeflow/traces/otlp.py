"""OpenTelemetry spans in OTLP's JSON, as Megatron-core's telemetry exports them: `megatron.microbatch.forward` and
`.backward`, with `dl.pipeline_parallel.rank` and a microbatch. Must not contain: other formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.traces.events import Event, RankEvents

RANKS = ("dl.pipeline_parallel.rank", "dl.rank")  # attributes of a span or of its resource
MICROBATCHES = ("dl.microbatch_id", "megatron.microbatch_id")
WORDS = {"megatron.microbatch.forward": "Forward", "megatron.microbatch.backward": "Backward"}


def read_otlp(text: str, source: str) -> list[RankEvents]:
    """The events of each pipeline rank in a file with one JSON object, or one in each line. Of several processes with
    the same pipeline rank, such as tensor ranks, the first one counts. Raises UsageError for spans without a rank.
    """
    found: dict[int, RankEvents] = {}
    owners: dict[int, object] = {}
    for resource in _resources(text):
        shared = _attributes(resource.get("resource", {}))
        process = shared.get("dl.rank", shared.get("service.instance.id"))
        for scope in resource.get("scopeSpans", []):
            for span in scope.get("spans", []):
                given = shared | _attributes(span)
                rank = next((int(given[key]) for key in RANKS if key in given), None)
                if rank is None:
                    raise UsageError(f"its spans have none of the attributes {', '.join(RANKS)}, which say the rank")
                if owners.setdefault(rank, process) == process:
                    events = found.setdefault(
                        rank, RankEvents(source, rank, _size(shared), str(shared.get("host.name", "")))
                    )
                    events.ranges.append(_event(span, given))
    return [found[rank] for rank in sorted(found)]


def _resources(text: str) -> Iterator[dict[str, Any]]:
    try:
        whole = [json.loads(text)]
    except ValueError:  # a line that is cut off ends the file
        whole = []
        for line in text.splitlines():
            try:
                whole.append(json.loads(line))
            except ValueError:
                break
    for each in whole:
        yield from each.get("resourceSpans", [])


def _attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as plain values: OTLP wraps each in an object that says its type."""
    return {each["key"]: next(iter(each["value"].values()), None) for each in holder.get("attributes", [])}


def _size(shared: Mapping[str, Any]) -> int | None:
    size = shared.get("dl.pipeline_parallel.size")
    return None if size is None else int(size)


def _event(span: Mapping[str, Any], given: Mapping[str, Any]) -> Event:
    name = str(span.get("name", ""))
    microbatch = next((given[key] for key in MICROBATCHES if key in given), None)
    if name in WORDS:
        word = WORDS[name]
        name = f"{word.lower()}_step" if microbatch is None else f"{word} {microbatch}"
    return Event(name, 1e-9 * int(span["startTimeUnixNano"]), 1e-9 * int(span["endTimeUnixNano"]))
