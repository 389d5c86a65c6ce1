"""Times: how times are written, and the axis above a drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pipeflow.core.text import number, seconds_text
from pipeflow.core.timeline import Timeline
from pipeflow.draw.column_pieces import round_half_up

PER_SECOND = {"h": 1 / 3600, "min": 1 / 60, "s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""How many of each unit are a second."""


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
