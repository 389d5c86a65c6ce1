"""Columns: how measures are shown, and what `--sort` calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from pipeflow.analysis.measures import Measures
from pipeflow.core.text import bytes_text, number, percent


@final
@dataclass(frozen=True, slots=True)
class Column:
    """A measure as it is shown. The less the better, in all of them. A `title` may have several lines;
    round numbers are powers of `base`.
    """

    field: str
    title: str
    text: Callable[[float], str]
    base: int = 10

    def of(self, measures: Measures) -> float | None:
        """The number; None where it is not known."""
        value: float | None = getattr(measures, self.field)
        return value

    def cell(self, measures: Measures) -> str:
        """The number as text."""
        value = self.of(measures)
        return "" if value is None else self.text(value)


COLUMNS = {  # by what --sort calls them
    "makespan": Column("makespan", "makespan", number),
    "span": Column("span", "span", number),
    "bubble": Column("makespan_bubble_ratio", "bubble", percent),
    "span-bubble": Column("bubble_ratio", "bubble\nof span", percent),
    "activations": Column("peak_activations", "peak\nactivations", number),
    "bytes": Column("peak_bytes", "peak\nmemory", bytes_text, 1024),
    "copies": Column("weight_copies", "weight\ncopies", number),
    "transfers": Column("transfers", "transfers", number),
}
