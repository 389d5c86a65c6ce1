"""perfetto: timelines as a trace for https://ui.perfetto.dev, in the Chrome trace event format."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from pipeflow.core.dataflow import DATAFLOW, Stream, Value, makes, needs
from pipeflow.core.rows import first_uses
from pipeflow.core.timeline import Span, Timeline
from pipeflow.draw.captions import heading, unit_of
from pipeflow.draw.colours import hue
from pipeflow.draw.lane_times import Lane, all_lanes, several

Event = dict[str, Any]


def perfetto(timelines: Timeline | Sequence[Timeline], *, factor: float = 1e6) -> str:
    """The timelines as the JSON text of a trace: a process per timeline, a thread per rank and stream, a slice per
    action, an arrow per value that passes from one thread to another, and a counter per rank for the memory that it
    keeps.

    Perfetto colours slices by their name without numbers, so by the kind of action. Other viewers of the format find a
    colour in the trace.

    Args:
        timelines: one timeline, or several.
        factor: microseconds per unit of the timelines' time. Default: for seconds.

    Raises UsageError for an empty sequence of timelines.
    """
    drawn = several(timelines)
    events: list[Event] = []
    thread = len(drawn) + 1  # the numbers of threads are unique over all processes
    for process, timeline in enumerate(drawn, start=1):
        events += _names(timeline, process, thread)
        timed = [*_slices(timeline, process, thread, factor), *_counters(timeline, process, thread, factor)]
        events += sorted(timed, key=lambda event: event["ts"])  # stable: a slice comes before what is bound to it
        thread += len(_tracks(timeline))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _names(timeline: Timeline, process: int, thread: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": heading(timeline)}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for number, lane in enumerate(_tracks(timeline)):
        of = {"ph": "M", "pid": process, "tid": thread + number}
        name = lane.name if lane.stream is Stream.COMPUTE else f"rank {lane.rank} {lane.name}"
        yield {**of, "name": "thread_name", "args": {"name": name}}
        yield {**of, "name": "thread_sort_index", "args": {"sort_index": lane.rank}}


def _tracks(timeline: Timeline) -> list[Lane]:
    """The computations of all ranks, then each other stream of all ranks."""
    return [lane for of_stream in zip(*all_lanes(timeline), strict=True) for lane in of_stream]


Bound = dict[str, Any]  # the end of an arrow: a thread, `tid`, and a moment within one of its slices, `ts`


def _slices(timeline: Timeline, process: int, thread: int, factor: float) -> Iterator[Event]:
    """The events of actions, and of the arrows between them."""
    stages, slices = timeline.placement.num_stages, timeline.slices
    made: defaultdict[Value, list[Bound]] = defaultdict(list)
    used: list[tuple[Value, Bound]] = []
    for track, lane in enumerate(_tracks(timeline), start=thread):
        free, first = 0.0, first_uses(span.action for span in timeline.rows[lane.rank])
        for span in lane.row:
            start = max(_microseconds(span.start, factor), free)
            free = max(_microseconds(span.end, factor), start)
            times = {"ph": "X", "pid": process, "tid": track, "ts": start, "dur": free - start}
            yield times | _described(span, lane.chunk(span))
            if start < free:  # otherwise no moment lies inside it for an arrow
                for value in makes(span.action, stages, slices):
                    made[value].append({"tid": track, "ts": (start + free) / 2})
                values = [*needs(span.action, stages, slices), *filter(None, [first.get(span.action)])]
                used += [(value, {"tid": track, "ts": start}) for value in values]
    yield from _arrows(made, used, process)


def _arrows(made: dict[Value, list[Bound]], used: list[tuple[Value, Bound]], process: int) -> Iterator[Event]:
    """The two ends of the arrow of each value that passes from one thread to another, from the last action that made it
    before.
    """
    for number, (value, end) in enumerate(used, start=process << 32 | 1):
        before = (each for each in made.get(value, ()) if each["ts"] <= end["ts"])
        start = max(before, key=itemgetter("ts"), default=None)
        if start is not None and start["tid"] != end["tid"]:
            called = {"pid": process, "cat": "transfer", "name": value.content.value, "id": number}
            yield {"ph": "s", **start, **called}
            yield {"ph": "f", "bp": "e", **end, **called}


def _described(span: Span, chunk: int) -> Event:
    action = span.action
    arguments: Event = {
        "kind": DATAFLOW[action.kind].name,
        "stage": action.stage,
        "chunk": chunk,
        "microbatch": action.microbatch,
        "rank": span.rank,
    }
    if action.slice is not None:
        arguments["slice"] = action.slice
    if span.partner is not None:
        arguments["overlapped with"] = str(span.partner)
    if span.exchange:
        arguments["of which for tokens of experts"] = span.exchange
    return {"name": str(action), "cat": "action", "cname": hue(action.kind).chrome, "args": arguments}


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
    """Rounded to eighths, which binary fractions represent exactly, so that adjacent slices do not overlap by a
    rounding error.
    """
    return round(time * factor * 8) / 8
