"""Captions: the words around a drawing, and how times and memory are written in it: units, the axis above, the scale of
memory lines, and text made safe for HTML and XML. Must not contain: where blocks are drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil
from typing import final

from pipeflow.core.analysis.measures import stream_times
from pipeflow.core.text import PER_SECOND, bytes_text, number, percent, seconds_text
from pipeflow.core.timeline import Timeline, require_timeline
from pipeflow.draw.lane_times import num_chunks, round_half_up


def escaped(text: str) -> str:
    """The text, escaped for an element or an attribute of HTML or XML. Characters that these cannot hold are replaced.

    >>> escaped("<b> & c")
    '&lt;b&gt; &amp; c'
    """
    return escape(_UNWRITABLE.sub("\ufffd", text))


_UNWRITABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of written times.

    Attributes:
        name: text after a time, such as "ms".
        factor: number that times are multiplied by.
    """

    name: str = ""
    factor: float = 1.0

    @classmethod
    def readable(cls, longest: float, name: str = "") -> Unit:
        """The unit `name` for times in seconds or, without a name, the largest one in which the `longest` is at least
        1.
        """
        name = name or seconds_text(longest).split()[-1]
        return cls(name, PER_SECOND.get(name, 1.0))

    @classmethod
    def of(cls, timelines: Iterable[Timeline], name: str = "", factor: float = 1.0) -> Unit:
        """The unit in which to write the times of `timelines`. If all are in seconds, they are converted to the unit
        `name` or, without a name, to the largest unit in which the longest makespan is at least 1. A `factor` other
        than 1 is used as it is.
        """
        drawn = list(timelines)
        for timeline in drawn:
            require_timeline(timeline)
        if factor != 1 or not drawn or any(timeline.unit != "s" for timeline in drawn):
            return cls(name, factor)
        return cls.readable(max(timeline.makespan for timeline in drawn), name)

    def text(self, time: float) -> str:
        """A time in this unit, with its name."""
        return f"{number(time * self.factor)} {self.name}".rstrip()


def axis(horizon: float, scale: float, width: int, unit: Unit) -> str:
    """A line of times up to `horizon`, each at its own column, as far as `width` columns hold them."""
    horizon, scale = horizon * unit.factor, scale / unit.factor
    step = round_step(10 / scale) if scale else 1.0
    line = ""
    for index in range(int(horizon / step + 1e-9) + 1):
        text = f"{index * step:.10g}" + f" {unit.name}" * (index == 0 and bool(unit.name))
        column = round_half_up(index * step * scale)
        if column + len(text) <= width:
            line = line.ljust(column) + text
    return line


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)


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


def heading(timeline: Timeline) -> str:
    """The name and the size of a timeline, such as "1f1b, 4 ranks, 8 microbatches"."""
    sizes = {"rank": len(timeline.rows), "chunk": num_chunks(timeline), "microbatch": timeline.num_microbatches}
    if sizes["chunk"] == 1:
        del sizes["chunk"]
    cut = f" of {timeline.slices} slices" if timeline.slices > 1 else ""
    return ", ".join([timeline.name, *(_count(number, word) for word, number in sizes.items())]) + cut


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{'' if number == 1 else plural}"


def summary(timeline: Timeline, unit: Unit) -> str:
    """The measures of a timeline in one line, two blanks apart: makespan, bubble and peak activations. The span and its
    bubble are added if the span is not the makespan. If anything runs beside the computations, so are the most time
    that a rank spends on each of those streams, and the exposed time.
    """
    parts = [f"makespan {unit.text(timeline.makespan)}"]
    if unit.text(timeline.span) != unit.text(timeline.makespan):
        parts.append(f"span {unit.text(timeline.span)}")
    if beside := [f"{stream} {unit.text(time)}" for stream, time in stream_times(timeline).items()]:
        parts.append(", ".join([*beside, f"exposed {unit.text(timeline.exposed)}"]))
    parts.append(f"bubble {percent(timeline.makespan_bubble_ratio)}")
    if unit.text(timeline.span) != unit.text(timeline.makespan):
        parts.append(f"bubble of span {percent(timeline.bubble_ratio)}")
    parts.append(f"peak activations {_peaks(timeline.peak_activations)}")
    return "  ".join(parts)


def _peaks(peaks: tuple[float, ...]) -> str:
    if len(set(peaks)) == 1:
        return f"{peaks[0]:.4g} on every rank"
    if len(peaks) <= 8:
        return " ".join(f"{peak:.4g}" for peak in peaks)
    most, least = peaks.index(max(peaks)), peaks.index(min(peaks))
    return f"{peaks[most]:.4g} (rank {most}) to {peaks[least]:.4g} (rank {least})"
