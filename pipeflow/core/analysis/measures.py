"""Measures: the numbers of a timeline that tables show, of the whole step and of every rank in a part of it. Must not
contain: text.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple, final

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.idle_time import critical_path
from pipeflow.core.dataflow import Stream, needs
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline


@final
@dataclass(frozen=True, slots=True)
class Measures:
    """The measures of a schedule and its timeline. Times are in the timeline's unit.

    Attributes:
        makespan, span, bubble_ratio, makespan_bubble_ratio: those of the timeline.
        peak_activations, peak_bytes: the peak of the rank that keeps the most. `peak_bytes` is None if bytes are not
            known.
        weight_copies: how many copies of the model's weights there are.
        transfers: how many values one step sends from one rank to another.
    """

    makespan: float
    span: float
    bubble_ratio: float
    makespan_bubble_ratio: float
    peak_activations: float
    peak_bytes: float | None
    weight_copies: int
    transfers: int

    @classmethod
    def of(cls, schedule: Schedule, timeline: Timeline) -> Measures:
        """The measures of `timeline`, which ran `schedule`."""
        return cls(
            makespan=timeline.makespan,
            span=timeline.span,
            bubble_ratio=timeline.bubble_ratio,
            makespan_bubble_ratio=timeline.makespan_bubble_ratio,
            peak_activations=max(timeline.peak_activations),
            peak_bytes=max(timeline.peak_bytes) if timeline.saved_bytes else None,
            weight_copies=len(schedule.placement.paths),
            transfers=_transfers(schedule),
        )


def _transfers(schedule: Schedule) -> int:
    placement = schedule.placement
    paths = len(placement.paths)
    found = 0
    for rank in range(placement.num_ranks):
        alike = Counter((each.kind, each.stage, each.microbatch % paths, each.slice) for each in schedule.actions(rank))
        for like, count in alike.items():
            values = needs(Action(*like), placement.num_stages, schedule.slices)
            found += count * sum(placement.rank_of(value.stage, value.microbatch) != rank for value in values)
    return found


class PathTimes(NamedTuple):
    """The parts of the critical path.

    Attributes:
        by_rank: per rank, the time that it computes on the path.
        beside: per other stream, the time that it runs on the path.
        waiting: the time in which the path only waits.
    """

    by_rank: list[float]
    beside: dict[Stream, float]
    waiting: float


def path_times(timeline: Timeline) -> PathTimes:
    """The parts that the makespan consists of."""
    by_rank = [0.0] * len(timeline.rows)
    beside = dict.fromkeys(beside_computations(timeline), 0.0)
    for span, *_ in critical_path(timeline):
        if span.stream is Stream.COMPUTE:
            by_rank[span.rank] += span.end - span.start
        else:
            beside[span.stream] += span.end - span.start
    waiting = timeline.makespan - sum(by_rank) - sum(beside.values())
    return PathTimes(by_rank, beside, waiting if waiting > 1e-9 * timeline.makespan else 0.0)


def beside_computations(timeline: Timeline) -> list[Stream]:
    """The streams besides the computations that anything runs on."""
    return [stream for stream in timeline.streams if stream is not Stream.COMPUTE]


def stream_times(timeline: Timeline) -> dict[Stream, float]:
    """Per stream besides the computations, the most time that a rank spends on it. Streams without any time are left
    out.
    """
    times = {
        stream: max(sum(span.end - span.start for span in row) for row in timeline.on(stream))
        for stream in beside_computations(timeline)
    }
    return {stream: time for stream, time in times.items() if time}


class RankWindow(NamedTuple):
    """One rank in a part of a timeline. Times are in the timeline's unit.

    Attributes:
        busy: per kind of action that runs there, the time that it takes.
        computing: the time in which the rank computes.
        idle: the rest of the time.
        utilisation: the share of the time in which the rank computes; 0 in a part that takes no time.
        peak: the most that the rank keeps at once, in the unit of `Timeline.memory`.
    """

    busy: dict[Kind, float]
    computing: float
    idle: float
    utilisation: float
    peak: float


def window(timeline: Timeline, first: float = 0.0, last: float = math.inf) -> tuple[RankWindow, ...]:
    """Every rank from the time `first` to the time `last`, as far as the step goes. Raises UsageError if `last` is
    before `first`.
    """
    if not first <= last:
        raise UsageError(f"the time to look at must end after it begins, got {first:g} to {last:g}")
    last = max(min(last, timeline.makespan), first)
    return tuple(_rank(timeline, rank, first, last) for rank in range(len(timeline.rows)))


def busy_times(timeline: Timeline) -> list[float]:
    """Per rank, the time in which it computes."""
    return [sum(span.end - span.start for span in row) for row in timeline.on(Stream.COMPUTE)]


def utilisations(timeline: Timeline) -> list[float]:
    """Per rank, the share of the makespan in which it computes."""
    return [_share(time, timeline.makespan) for time in busy_times(timeline)]


def _rank(timeline: Timeline, rank: int, first: float, last: float) -> RankWindow:
    busy: dict[Kind, float] = defaultdict(float)
    for span in timeline.rows[rank]:
        if span.start < last and span.end > first:
            busy[span.action.kind] += min(span.end, last) - max(span.start, first)
    spans = timeline.on(Stream.COMPUTE)[rank]
    computing = math.fsum(max(min(span.end, last) - max(span.start, first), 0.0) for span in spans)
    curve = timeline.memory(rank)
    before = max((step for step in curve if step[0] <= first), default=(0.0, 0.0))[1]
    peak = max((amount for time, amount in curve if first < time < last), default=0.0)
    used = _share(computing, last - first)
    idle = max(last - first - computing, 0.0)
    return RankWindow({kind: busy[kind] for kind in Kind if kind in busy}, computing, idle, used, max(before, peak))


def _share(time: float, whole: float) -> float:
    """A share of a time; at most 1, since spans that were measured may overlap."""
    return min(time / whole, 1.0) if whole else 0.0
