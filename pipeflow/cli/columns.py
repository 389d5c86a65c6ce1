"""Columns: the text of measures, and their names for `--sort`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from pipeflow.analysis.measures import Measures
from pipeflow.core.text import bytes_text, number, percent


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


COLUMNS = {  # by their names for --sort
    "makespan": Column("makespan", "makespan", number),
    "span": Column("span", "span", number),
    "bubble": Column("makespan_bubble_ratio", "bubble", percent),
    "span-bubble": Column("bubble_ratio", "bubble\nof span", percent),
    "activations": Column("peak_activations", "peak\nactivations", number),
    "bytes": Column("peak_bytes", "peak\nmemory", bytes_text, 1024),
    "copies": Column("weight_copies", "weight\ncopies", number),
    "transfers": Column("transfers", "transfers", number),
}
