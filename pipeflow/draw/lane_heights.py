"""Heights: the heights of a rank's lanes, in pixels."""

from __future__ import annotations

from typing import NamedTuple

SPACE = 1  # pixels between the lanes of a rank


class Heights(NamedTuple):
    """The heights of one rank's part of a drawing, in pixels.

    Attributes:
        lane: the lane of its computations.
        beside: the lane of any other stream.
        memory: the lane of its memory.
        gap: the gap before the next rank.
    """

    lane: int
    beside: int
    memory: int
    gap: int

    def offset(self, lane: int) -> int:
        """The distance from the top of the first lane to the top of the one with index `lane`."""
        return 0 if lane == 0 else self.lane + SPACE + (lane - 1) * (self.beside + SPACE)


def heights(ranks: int, cap: bool = False) -> Heights:
    """The heights for a number of ranks: the more ranks, the smaller. With a `cap`, memory has room for a scale."""
    if ranks <= 8:
        return Heights(24, 10, 36 if cap else 16, 8)
    if ranks <= 16:
        return Heights(20, 8, 26 if cap else 12, 6)
    if ranks <= 32:
        return Heights(14, 6, 18 if cap else 8, 5)
    return Heights(9, 4, 12 if cap else 7, 3)
