"""Measures: what one plan costs, in the numbers by which plans are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from pipeflow.core.dataflow import needs
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
            makespan_bubble_ratio=1 - timeline.work / timeline.makespan if timeline.makespan else 0.0,
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
