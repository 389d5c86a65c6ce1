"""Rounds: the order in which ranks exchange data until every rank has the data of all (Bruck's algorithm). Must not
contain: the transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Round(NamedTuple):
    """One round: every rank r sends to rank r - `distance`.

    Attributes:
        distance: how many ranks away the receiver is.
        ranks: how many ranks' data it sends: its own, and those of the ranks after it.
    """

    distance: int
    ranks: int


def rounds(ranks: int) -> Iterator[Round]:
    """The ceil(log2 `ranks`) rounds. After each one, a rank has the data of twice as many ranks, or of all."""
    distance = 1
    while distance < ranks:
        yield Round(distance, min(distance, ranks - distance))
        distance *= 2
