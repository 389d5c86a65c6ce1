"""Measures: what one plan costs, in the numbers by which plans are compared."""

from __future__ import annotations

from collections.abc import Callable
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


@final
@dataclass(frozen=True, slots=True)
class Column:
    """A measure as it is shown. The less the better, in all of them. A `title` may have several lines."""

    field: str
    title: str
    text: Callable[[float], str]

    def of(self, measures: Measures) -> float | None:
        """The number; None where it is not known."""
        value: float | None = getattr(measures, self.field)
        return value

    def cell(self, measures: Measures) -> str:
        """The number as text."""
        value = self.of(measures)
        return "" if value is None else self.text(value)


def number(value: float) -> str:
    """Four digits, or all that stand before the point."""
    return f"{value:{'.4g' if abs(value) < 9999.5 else '.0f'}}"


def percent(value: float) -> str:
    """A part of the whole, as people write it."""
    from pipeflow.draw.measures import percent

    return percent(value)


def size(value: float) -> str:
    """Bytes, as people write them."""
    from pipeflow.draw.memory import bytes_text

    return bytes_text(value)


COLUMNS = {  # by what --sort calls them
    "makespan": Column("makespan", "makespan", number),
    "span": Column("span", "span", number),
    "bubble": Column("bubble_ratio", "bubble\nof span", percent),
    "makespan-bubble": Column("makespan_bubble_ratio", "bubble of\nmakespan", percent),
    "activations": Column("peak_activations", "peak\nactivations", number),
    "bytes": Column("peak_bytes", "peak\nmemory", size),
    "copies": Column("weight_copies", "weight\ncopies", number),
    "transfers": Column("transfers", "transfers", number),
}
