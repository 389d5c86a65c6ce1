"""Measures: what one schedule costs, in the numbers by which schedules are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

from pipeflow.analysis.causes import critical_path
from pipeflow.core.dataflow import Stream, needs
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline


@final
@dataclass(frozen=True, slots=True)
class Measures:
    """Of a schedule and its timeline. Times are in the timeline's unit; peaks are those of the rank that keeps the
    most; `weight_copies` is how often the model is there; `transfers` counts the values that one step sends from a
    rank to another.
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
    return sum(
        placement.rank_of(value.stage, value.microbatch) != rank
        for rank in range(placement.num_ranks)
        for action in schedule.actions(rank)
        for value in needs(action, placement.num_stages)
    )


class PathTimes(NamedTuple):
    """Of the critical path: per rank the time that it computes there, per other stream the time that it runs there, and
    the time in which the path only waits.
    """

    by_rank: list[float]
    beside: dict[Stream, float]
    waiting: float


def path_times(timeline: Timeline) -> PathTimes:
    """What the makespan consists of."""
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
    """The streams beside that of the computations on which anything runs."""
    return [stream for stream in timeline.streams if stream is not Stream.COMPUTE]


def stream_times(timeline: Timeline) -> dict[Stream, float]:
    """Per stream beside the computations the most time that a rank runs there; without those that take none."""
    times = {
        stream: max(sum(span.end - span.start for span in row) for row in timeline.on(stream))
        for stream in beside_computations(timeline)
    }
    return {stream: time for stream, time in times.items() if time}
