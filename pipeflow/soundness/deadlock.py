"""Deadlock: the cycle of waits behind ranks that wait for ever. Must not contain: how one finds out that ranks wait for
ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pipeflow.core.violation import Violation

Place = tuple[int, int]  # rank, position


def deadlocks(
    stuck: Sequence[Place], waits_for: Callable[[Place], Place | None], text: Callable[[Place], str], expected: str
) -> Iterator[Violation]:
    """Every cycle among the places where ranks are `stuck`, one violation each.

    Args:
        stuck: places of the ranks that cannot go on, one per rank.
        waits_for: the place that a stuck place waits for. On another rank it is where that rank is stuck, or later.
            None: it waits for something that no place makes.
        text: the text of a place.
        expected: the `expected` of the violations.

    A cycle is shown as a chain in which each place would have to come before the next: for each rank, where it is stuck
    and what the rank before it waits for.
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
            cycle = [(each, at[each]) for each in path[path.index(rank) :]]
            chain = _chain(cycle, waits_for)
            said = " -> ".join(f"{text(place)} (rank {place[0]})" for place in chain)
            yield Violation(f"deadlock: {said}", expected, *cycle[0], tuple(chain[:-1]))


def _chain(cycle: list[Place], waits_for: Callable[[Place], Place | None]) -> list[Place]:
    """The places of a cycle in the order in which they would have to run; the first one comes again at the end. Each
    place of `cycle` waits for something at or behind the next one.
    """
    chain = cycle[:1]
    for place in reversed(cycle):
        needed = waits_for(place)
        if needed is not None and needed != chain[-1]:
            chain.append(needed)
        chain.append(place)
    return chain
