"""Heights: how high, in pixels, a rank's lanes are drawn."""

from __future__ import annotations

from typing import NamedTuple

SPACE = 1  # between the lanes of a rank


class Heights(NamedTuple):
    """Of what belongs to one rank, in pixels: the lane of its computations, those of what runs beside them, that of its
    memory, and the gap before the next rank.
    """

    lane: int
    beside: int
    memory: int
    gap: int

    def offset(self, lane: int) -> int:
        """How far below the first lane another one begins."""
        return 0 if lane == 0 else self.lane + SPACE + (lane - 1) * (self.beside + SPACE)


def heights(ranks: int) -> Heights:
    """The flatter the more ranks there are."""
    if ranks <= 8:
        return Heights(24, 10, 16, 8)
    if ranks <= 16:
        return Heights(20, 8, 12, 6)
    return Heights(14, 6, 8, 5) if ranks <= 32 else Heights(9, 4, 7, 3)
