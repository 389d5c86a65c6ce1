"""MemoryScale: the unit of a drawing's memory lines, and the scale of their bars and digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import final

from pipeflow.core.text import bytes_text
from pipeflow.core.timeline import Timeline


@final
@dataclass(frozen=True, slots=True)
class MemoryScale:
    """The scale of the memory lines of several timelines.

    Attributes:
        highest: the highest amount, in bytes or in activations.
        in_bytes: whether amounts are in bytes.
        whole: whether all amounts are whole numbers.
    """

    highest: float
    in_bytes: bool
    whole: bool

    @property
    def digits(self) -> int:
        """The digit of the highest amount: the amount itself, rounded up, if that has one digit; otherwise 9."""
        return ceil(self.highest) if not self.in_bytes and self.highest <= 9 else 9

    @property
    def what(self) -> str:
        return "memory kept" if self.in_bytes else "activations kept"

    @property
    def about_digits(self) -> str:
        """The entry of the legend that explains the digits."""
        if self.digits < 2:
            return "1 activation kept" if self.digits else "nothing kept"
        if self.digits != self.highest and self.digits == 9:
            return f"1-9 {self.what}, 9 is {self.text(self.highest)}"
        return f"1-{self.digits} {self.what}{'' if self.whole else ', rounded up'}"

    def digit(self, amount: float) -> int:
        """The amount as one digit."""
        if self.digits == 9 and self.highest:
            amount *= 9 / self.highest
        return min(ceil(amount - 1e-6), 9)

    def eighth(self, amount: float) -> int:
        """The amount in eighths of the highest one, rounded up."""
        return min(ceil(amount / self.highest * 8 - 1e-6), 8) if self.highest else 0

    def text(self, amount: float) -> str:
        """An amount as people write it: "1.5 GiB", or a number of activations."""
        return bytes_text(amount) if self.in_bytes else f"{amount:.4g}"


def unit_of(timeline: Timeline) -> str:
    """The unit of `Timeline.memory`: bytes or activations."""
    return "bytes" if timeline.saved_bytes else "activations"


def peaks(timeline: Timeline) -> tuple[float, ...]:
    """The peak of `Timeline.memory` of each rank."""
    return timeline.peak_bytes if timeline.saved_bytes else timeline.peak_activations


def amount_text(timeline: Timeline, memory: float) -> str:
    """An amount of `Timeline.memory` as people write it."""
    return bytes_text(memory) if timeline.saved_bytes else f"{memory:.4g}"


def same_memory(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The timelines with memory in one unit: activations, unless all of them have bytes."""
    if all(timeline.saved_bytes for timeline in timelines):
        return [*timelines]
    return [replace(timeline, saved_bytes=(), deferred_bytes=()) for timeline in timelines]


def memory_of(timelines: Sequence[Timeline]) -> MemoryScale:
    """The scale for timelines whose memory has one unit."""
    curves = [timeline.memory(rank) for timeline in timelines for rank in range(len(timeline.rows))]
    amounts = [amount for curve in curves for _, amount in curve]
    whole = all(amount == int(amount) for amount in amounts)
    return MemoryScale(max(amounts, default=0.0), bool(timelines[0].saved_bytes), whole)
