"""Shapes: how much longer products of measured shapes take than the coefficients of `Efficiency` say. Must not contain:
measuring (`pipeflow calibrate` does that), and the coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from pipeflow.core.errors import UsageError


class ShapeTime(NamedTuple):
    """A measured shape of products.

    Attributes:
        rows: rows, which are tokens.
        shortest: the shorter dimension of the weight.
        longer: how many times as long such a product takes as the coefficients say.
    """

    rows: float
    shortest: float
    longer: float


def shape_times(rows: Iterable[Iterable[float]]) -> tuple[ShapeTime, ...]:
    """The rows of a table. Raises UsageError unless each has three positive, finite numbers."""
    found = tuple(tuple(row) if isinstance(row, list | tuple) else (row,) for row in rows)
    for row in found:
        if len(row) != 3 or not all(isinstance(each, int | float) and 0 < each < math.inf for each in row):
            raise UsageError(
                "shapes must have rows of three positive numbers (rows, shortest dimension of the weight, how many "
                f"times as long), got {row!r}"
            )
    return tuple(ShapeTime(*map(float, row)) for row in found)


@lru_cache(maxsize=4096)
def longer(table: tuple[ShapeTime, ...], rows: float, shortest: float) -> float:
    """How many times as long products of this shape take: the mean of what was measured, of the logarithms, where near
    shapes count most, by the square of their distance in doublings. 1 without a table.
    """
    weights, found = 0.0, 0.0
    for each in table:
        distance = math.log2(rows / each.rows) ** 2 + math.log2(shortest / each.shortest) ** 2
        if not distance:
            return each.longer
        weights += 1 / distance
        found += math.log(each.longer) / distance
    return math.exp(found / weights) if weights else 1.0
