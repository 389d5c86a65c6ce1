"""Rounds: the order in which ranks exchange data until every rank has the data of all (Bruck's algorithm). Must not
contain: the transfers.
"""

from __future__ import annotations

from collections.abc import Iterator


def rounds(ranks: int) -> Iterator[tuple[int, int]]:
    """The ceil(log2 `ranks`) rounds, as (distance, number): every rank r sends to rank r - distance the data of so many
    ranks, its own and those of the ranks after it. A rank then has the data of twice as many ranks, or of all.
    """
    distance = 1
    while distance < ranks:
        yield distance, min(distance, ranks - distance)
        distance *= 2
