"""Columns: the text of measures, their changes, and the plot of two of them. Must not contain: where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from pipeflow.core.analysis.measures import Measures
from pipeflow.core.text import bytes_text, number, percent
from pipeflow.draw.captions import Unit
from pipeflow.draw.plane import Axis, Point

TIMES = ("makespan", "span")
RATIOS = ("bubble", "span-bubble")


@final
@dataclass(frozen=True, slots=True)
class Column:
    """A measure as a column of a table. In all of them, less is better.

    Attributes:
        field: the field of `Measures`.
        title: title of the column; it may have several lines.
        text: function that writes a number.
        base: ticks of an axis are powers of this base times 1, 2 or 5.
    """

    field: str
    title: str
    text: Callable[[float], str]
    base: int = 10

    def of(self, measures: Measures) -> float | None:
        """The number; None if it is not known."""
        value: float | None = getattr(measures, self.field)
        return value

    def cell(self, measures: Measures) -> str:
        """The number as text."""
        value = self.of(measures)
        return "" if value is None else self.text(value)


COLUMNS = {  # by their names on a command line
    "makespan": Column("makespan", "makespan", number),
    "span": Column("span", "span", number),
    "bubble": Column("makespan_bubble_ratio", "bubble", percent),
    "span-bubble": Column("bubble_ratio", "bubble\nof span", percent),
    "activations": Column("peak_activations", "peak\nactivations", number),
    "bytes": Column("peak_bytes", "peak\nmemory", bytes_text, 1024),
    "copies": Column("weight_copies", "weight\ncopies", number),
    "transfers": Column("transfers", "transfers", number),
}


class MeasureChange(NamedTuple):
    """A measure before and after, as texts.

    Attributes:
        before, after: the numbers.
        change, part: the difference, and the same as a part of the number before; empty where that says nothing.
    """

    before: str
    after: str
    change: str
    part: str


def columns_in(unit: Unit) -> dict[str, Column]:
    """`COLUMNS`, with times in `unit`."""
    return COLUMNS | {name: replace(COLUMNS[name], text=unit.text) for name in TIMES}


def changes(first: Measures, second: Measures, unit: Unit) -> dict[str, MeasureChange]:
    """By the titles of their columns, the measures that both have, and by how much they differ."""
    found = {}
    for name, column in columns_in(unit).items():
        before, after = column.of(first), column.of(second)
        if before is not None and after is not None:
            found[" ".join(column.title.split())] = MeasureChange(
                column.text(before), column.text(after), *_change(name, before, after, column.text)
            )
    return found


def _change(name: str, before: float, after: float, text: Callable[[float], str]) -> tuple[str, str]:
    if name in RATIOS and not _is_same(before, after):
        return f"{100 * (after - before):+.1f} points", ""
    return difference_text(before, after, text)


def difference_text(before: float, after: float, text: Callable[[float], str]) -> tuple[str, str]:
    """The difference of two numbers, and the same as a part of the first; empty where that says nothing."""
    if _is_same(before, after):
        return "same", ""
    sign = "+" if after > before else "-"
    return sign + text(abs(after - before)), f"{(after - before) / before:+.1%}" if before else ""


def _is_same(before: float, after: float) -> bool:
    return abs(after - before) <= 1e-9 * max(abs(before), abs(after))


def plot(found: Mapping[str, Measures]) -> tuple[list[Point], Axis, Axis]:
    """The bubble against the peak memory of each schedule: in bytes if they are known for all, else in activations; as
    points and the axes x and y.
    """
    kept = COLUMNS["activations" if any(measures.peak_bytes is None for measures in found.values()) else "bytes"]
    lost = COLUMNS["bubble"]
    x, y = (Axis(" ".join(each.title.split()), each.text, each.base) for each in (kept, lost))
    return [Point(name, kept.of(each) or 0.0, lost.of(each) or 0.0) for name, each in found.items()], x, y


def grouped(refused: Mapping[str, str]) -> list[str]:
    """One line per reason, with the schedules that it keeps out. `refused` has the reason per schedule."""
    return [
        f"{', '.join(name for name in refused if refused[name] == why)}: {why}"
        for why in dict.fromkeys(refused.values())
    ]
