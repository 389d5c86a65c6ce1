"""Data: the data of a page. Every number and name that its modules show comes from here. Must not contain: HTML."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from pipeflow.analysis.idle_time import IDLE, SENTENCES, Cause, causes, critical_path
from pipeflow.analysis.time_window import utilisations
from pipeflow.core.action import Kind
from pipeflow.core.dataflow import DATAFLOW, PASSING, SEVERAL, VALUE, Content, Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.span import Row, Span
from pipeflow.core.text import percent
from pipeflow.core.timeline import Timeline
from pipeflow.draw.column_pieces import shortest
from pipeflow.draw.lane_heights import heights
from pipeflow.draw.lane_rows import all_lanes, num_chunks
from pipeflow.draw.memory import amount_text, peaks, unit_of
from pipeflow.draw.page.block_colours import palettes
from pipeflow.draw.times import Unit

CONTENTS = list(Content)
Cap = float | Sequence[float] | None
FIND = {
    "none": "nothing matches {text}",
    "form": "write an action such as 2F0, a part of one such as 2F or F0, or rank, stage, chunk or microbatch with its "
    "number",
}


def page_data(timelines: tuple[Timeline, ...], unit: Unit, cap: Cap = None) -> dict[str, Any]:
    """The data of a page for `timelines`, as JSON values. `cap` is the most that a rank should keep, one number or one
    per rank, in the unit of `Timeline.memory`. Raises UsageError if there is not one for each rank.
    """
    chunks = max(map(num_chunks, timelines))
    microbatches = max(timeline.num_microbatches for timeline in timelines)
    return {
        "unit": unit.name,
        "factor": unit.factor,
        "shortest": shortest(timelines),
        "kinds": {kind.value: _kind(kind, chunks, microbatches) for kind in Kind},
        "sentences": {**SENTENCES, **IDLE, "value": VALUE},
        "find": FIND,
        "contents": CONTENTS,
        "timelines": [_timeline(timeline, _caps(timeline, cap)) for timeline in timelines],
    }


def _caps(timeline: Timeline, cap: Cap) -> Sequence[float]:
    """The cap of each rank; empty: none."""
    ranks = len(timeline.rows)
    if cap is None or isinstance(cap, int | float):
        return () if cap is None else (cap,) * ranks
    if len(cap) != ranks:
        raise UsageError(f"the memory cap has {len(cap)} numbers for {ranks} ranks: give one number, or one per rank")
    return cap


def _kind(kind: Kind, chunks: int, microbatches: int) -> dict[str, Any]:
    """`colours`: per mode. `passes`: whether other stages wait for it. `single`: whether it belongs to one microbatch
    alone. `counts`: what the number in its name is.
    """
    flow = DATAFLOW[kind]
    return {
        "name": flow.name,
        "stream": flow.stream,
        "colours": palettes(kind, chunks, microbatches),
        "passes": any(content in PASSING for content, _ in flow.makes),
        "single": kind not in SEVERAL,
        "counts": "last microbatch" if flow.joint else "number" if kind in SEVERAL else "microbatch",
    }


def _timeline(timeline: Timeline, caps: Sequence[float]) -> dict[str, Any]:
    drawn, most, levels = all_lanes(timeline), peaks(timeline), _levels(timeline)
    level = {amount: index for index, amount in enumerate(levels)}
    highest = max([0.0, *most, *caps])
    return {
        "makespan": _short(timeline.makespan),
        "streams": [lane.stream for lane in drawn[0]],
        "highest": _short(highest),
        "scale": amount_text(timeline, highest),
        "levels": [[_short(amount), text] for amount, text in levels.items()],
        "heights": heights(len(drawn), bool(caps))._asdict(),
        "path": [_place(timeline, cause.span) for cause in critical_path(timeline)],
        "rows": [
            {
                **_row(timeline.rows[rank]),
                "names": [lane.name for lane in lanes],
                "chunks": _chunks(timeline, rank),
                "causes": [*_causes(timeline, why)],
                "memory": [(_short(time), level[amount]) for time, amount in timeline.memory(rank)],
                "peak": amount_text(timeline, most[rank]),
                "used": percent(used),
                "cap": _cap(timeline, caps[rank], most[rank], level) if caps else None,
            }
            for rank, (lanes, why, used) in enumerate(zip(drawn, causes(timeline), utilisations(timeline), strict=True))
        ],
    }


def _chunks(timeline: Timeline, rank: int) -> dict[int, int]:
    """Per stage in the row of a rank, its chunk: that on the rank that holds it, or 0 if there is no such stage."""
    placement = timeline.placement
    held = {stage: chunk for chunk, stage in enumerate(placement.stages_of(rank))}
    others = {span.action.stage for span in timeline.rows[rank]} - held.keys()
    return held | {stage: placement.chunk_of(stage) if stage < placement.num_stages else 0 for stage in others}


def _cap(timeline: Timeline, cap: float, peak: float, level: dict[float, int]) -> dict[str, Any]:
    """A rank's cap, and for each level above it the words that say by how much."""
    text, unit = amount_text(timeline, cap), _counted(timeline)
    above = {
        index: f"{amount_text(timeline, amount - cap)}{unit} above the cap of {text}"
        for amount, index in level.items()
        if cap * (1 + 1e-9) < amount <= peak
    }
    return {"amount": _short(cap), "text": f"cap {text}", "above": above}


def _row(row: Row) -> dict[str, Any]:
    """The actions with their times, and the indices of both actions of each pair."""
    index = {span.action: position for position, span in enumerate(row)}
    pairs = [(index[span.action], index[span.partner]) for span in row if span.partner in index]
    return {
        "actions": " ".join(str(span.action) for span in row),
        "times": [_short(time) for span in row for time in (span.start, span.end)],
        "pairs": [pair for pair in pairs if pair[0] < pair[1]],
    }


def _causes(timeline: Timeline, row: Sequence[Cause]) -> Iterator[tuple[int, ...]]:
    """For each span whose cause is not the span before it on its stream: its index; rank and index of the span that it
    started after, unless it started at once; content, stage and microbatch of the value that it waited for, if any.
    """
    before: dict[Stream, Span] = {}
    for index, (span, after, value) in enumerate(row):
        if value is not None or after is not before.get(span.stream):
            place = () if after is None else _place(timeline, after)
            waited = () if value is None else (CONTENTS.index(value.content), value.stage, value.microbatch)
            yield index, *place, *waited
        before[span.stream] = span


def _place(timeline: Timeline, span: Span) -> tuple[int, int]:
    """The rank of a span, and its index in the rank's row."""
    row = timeline.rows[span.rank]
    index = bisect_left(row, span.start, key=attrgetter("start"))
    while row[index] is not span:
        index += 1
    return span.rank, index


def _levels(timeline: Timeline) -> dict[float, str]:
    """All amounts that a rank keeps at some time, and their text."""
    curves = (timeline.memory(rank) for rank in range(len(timeline.rows)))
    amounts = dict.fromkeys((0.0, *(amount for curve in curves for _, amount in curve)))
    counted = _counted(timeline)
    return {amount: f"{amount_text(timeline, amount)}{counted}" for amount in amounts}


def _counted(timeline: Timeline) -> str:
    """The word behind an amount; bytes have their unit in the amount."""
    return "" if timeline.saved_bytes else f" {unit_of(timeline)}"


@lru_cache(1 << 16)
def _short(number: float) -> float:
    """A number, rounded to nine digits and written in as few characters as possible."""
    rounded = float(f"{number:.9g}")
    return int(rounded) if rounded.is_integer() else rounded
