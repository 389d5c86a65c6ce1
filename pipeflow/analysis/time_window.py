"""Window: what every rank does in a part of a timeline. Must not contain: text."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline


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


def utilisations(timeline: Timeline) -> list[float]:
    """Per rank, the share of the makespan in which it computes."""
    times = (sum(span.end - span.start for span in row) for row in timeline.on(Stream.COMPUTE))
    return [_share(time, timeline.makespan) for time in times]


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
