"""perfetto: timelines as a trace for https://ui.perfetto.dev, in the Chrome trace event format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Stream, Value, makes, needs
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline
from pipeflow.draw.looks import chunks_of, several
from pipeflow.draw.measures import heading
from pipeflow.draw.memory import unit_of
from pipeflow.draw.painters import NAMES

Event = dict[str, Any]

COLOURS = {  # of the names that chrome://tracing has colours for, the nearest to those of the other drawings
    Kind.F: "rail_response",
    Kind.B: "rail_load",
    Kind.I: "detailed_memory_dump",
    Kind.W: "rail_idle",
    Kind.R: "rail_animation",
}


def perfetto(timelines: Timeline | Sequence[Timeline], *, factor: float = 1e6) -> str:
    """A process per timeline, a thread per rank and one for its reductions, a slice per action, an arrow per value that
    passes from one thread to another, and a counter per rank for the memory that its forwards keep.

    `factor` is microseconds per unit of the timelines' time: as it stands, for seconds.

    Perfetto colours slices by their name without its numbers, so by the kind of action; other viewers of the format
    are told a colour. Raises UsageError when there is no timeline.
    """
    drawn = several(timelines)
    events: list[Event] = []
    thread = len(drawn) + 1  # a thread's number is its alone, in all processes
    for process, timeline in enumerate(drawn, start=1):
        events += _names(timeline, process, thread)
        timed = [*_slices(timeline, process, thread, factor), *_counters(timeline, process, thread, factor)]
        events += sorted(timed, key=lambda event: event["ts"])  # stable: a slice stands before what is bound to it
        thread += len(list(_tracks(timeline)))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _names(timeline: Timeline, process: int, thread: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": heading(timeline)}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for number, (name, rank, _) in enumerate(_tracks(timeline)):
        of = {"ph": "M", "pid": process, "tid": thread + number}
        yield {**of, "name": "thread_name", "args": {"name": name}}
        yield {**of, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _tracks(timeline: Timeline) -> Iterator[tuple[str, int, Row]]:
    """A name, a rank and its spans: first the computations of all ranks, then what runs beside them."""
    for rank, row in enumerate(timeline.on(Stream.COMPUTE)):
        yield f"rank {rank}", rank, row
    if Stream.REDUCE in timeline.streams:
        for rank, row in enumerate(timeline.on(Stream.REDUCE)):
            yield f"rank {rank} reductions", rank, row


def _slices(timeline: Timeline, process: int, thread: int, factor: float) -> Iterator[Event]:
    """The actions, and the transfers between them."""
    stages = timeline.placement.num_stages
    arrows: dict[Value, Event] = {}  # per value, the event in its maker's slice
    ends: list[Event] = []
    for track, (_, rank, row) in enumerate(_tracks(timeline)):
        of = {"pid": process, "tid": thread + track}
        chunks = chunks_of(timeline, rank)
        free = 0.0
        for span in row:
            start = max(_microseconds(span.start, factor), free)
            free = max(_microseconds(span.end, factor), start)
            yield {"ph": "X", **of, "ts": start, "dur": free - start, **_described(span, chunks[span.action.stage])}
            if start == free:
                continue  # no moment is inside it that an arrow could be bound to
            for value in makes(span.action, stages):
                arrows[value] = {"ph": "s", **of, "ts": (start + free) / 2}
            ends += [{"ph": "f", "bp": "e", **of, "ts": start, "value": value} for value in needs(span.action, stages)]
    yield from _arrows(arrows, ends)


def _arrows(starts: dict[Value, Event], ends: list[Event]) -> Iterator[Event]:
    """Where a value passes from one thread to another, both ends of its arrow."""
    for number, end in enumerate(ends, start=1):
        value: Value = end.pop("value")
        start = starts.get(value)
        if start is not None and start["tid"] != end["tid"]:
            called = {"cat": "transfer", "name": value.content.value, "id": start["pid"] << 32 | number}
            yield {**start, **called}
            yield {**end, **called}


def _described(span: Span, chunk: int) -> Event:
    action = span.action
    arguments: Event = {
        "kind": NAMES[action.kind],
        "stage": action.stage,
        "chunk": chunk,
        "microbatch": action.microbatch,
        "rank": span.rank,
    }
    if span.partner is not None:
        arguments["overlapped with"] = str(span.partner)
    return {"name": str(action), "cat": "action", "cname": COLOURS[action.kind], "args": arguments}


def _counters(timeline: Timeline, process: int, thread: int, factor: float) -> Iterator[Event]:
    for rank in range(len(timeline.rows)):
        for time, memory in timeline.memory(rank):
            yield {
                "ph": "C",
                "pid": process,
                "tid": thread + rank,
                "ts": _microseconds(time, factor),
                "name": f"rank {rank}",
                "args": {unit_of(timeline): memory},
            }


def _microseconds(time: float, factor: float) -> float:
    """In eighths, which binary fractions write exactly, so that slices that meet do not overlap by a rounding."""
    return round(time * factor * 8) / 8
