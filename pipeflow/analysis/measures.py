"""Measures: the numbers by which schedules are compared. Must not contain: their text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, final

from pipeflow.analysis.idle_time import critical_path
from pipeflow.core.action import Action
from pipeflow.core.dataflow import Stream, needs
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
        alike = Counter((each.kind, each.stage, each.microbatch % paths) for each in schedule.actions(rank))
        for like, count in alike.items():
            values = needs(Action(*like), placement.num_stages)
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
