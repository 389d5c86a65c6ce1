"""Rounds: in which order ranks tell each other something until all know all (Bruck's algorithm)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Round(NamedTuple):
    """Every rank r tells rank r - distance what it knows of so many ranks: of itself and of those after it."""

    distance: int
    ranks: int


def rounds(ranks: int) -> Iterator[Round]:
    """ceil(log2 ranks) of them; after each, a rank knows twice as many, or all."""
    distance = 1
    while distance < ranks:
        yield Round(distance, min(distance, ranks - distance))
        distance *= 2
