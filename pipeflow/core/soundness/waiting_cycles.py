"""Cycles: the ranks that wait for each other behind ranks that wait for ever. Must not contain: how one finds out that
ranks wait for ever, nor words about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

Place = tuple[int, int]  # rank, position


class Cycle(NamedTuple):
    """Ranks that wait for each other.

    Attributes:
        stuck: the place where each rank is stuck. Each waits for something at or behind the next one.
        chain: the places in the order in which they would have to run, for each rank where it is stuck and what the
            rank before it waits for; the first one comes again at the end.
    """

    stuck: list[Place]
    chain: list[Place]


def cycles(stuck: Sequence[Place], waits_for: Callable[[Place], Place | None]) -> Iterator[Cycle]:
    """Every cycle among the places where ranks are `stuck`.

    Args:
        stuck: places of the ranks that cannot go on, one per rank.
        waits_for: the place that a stuck place waits for. On another rank it is where that rank is stuck, or later.
            None: it waits for something that no place makes.
    """
    at = dict(stuck)
    seen: set[int] = set()
    for start in at:
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in seen:
            seen.add(rank)
            path.append(rank)
            maker = waits_for((rank, at[rank]))
            rank = None if maker is None else maker[0]
        if rank is not None and rank in path:
            places = [(each, at[each]) for each in path[path.index(rank) :]]
            yield Cycle(places, _chain(places, waits_for))


def _chain(cycle: list[Place], waits_for: Callable[[Place], Place | None]) -> list[Place]:
    chain = cycle[:1]
    for place in reversed(cycle):
        needed = waits_for(place)
        if needed is not None and needed != chain[-1]:
            chain.append(needed)
        chain.append(place)
    return chain
