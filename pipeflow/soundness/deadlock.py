"""Deadlock: why ranks that wait for ever do so. What must not live here: how one finds out that they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pipeflow.core.violation import Violation

Place = tuple[int, int]  # rank, position


def deadlocks(
    stuck: Sequence[Place], waits_for: Callable[[Place], Place], text: Callable[[Place], str], expected: str
) -> Iterator[Violation]:
    """Every cycle among the places where ranks are `stuck`, one violation each.

    What a stuck rank `waits_for` is where another one is stuck, or behind. Going from one to the next ends in a cycle,
    shown as a chain in which each place must come before the next: of each rank, where it is stuck and what others
    wait for.
    """
    at = dict(stuck)
    seen: set[int] = set()
    for start in at:
        path: list[int] = []
        rank = start
        while rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank, _ = waits_for((rank, at[rank]))
        if rank in path:
            cycle = [(each, at[each]) for each in path[path.index(rank) :]]
            chain = " -> ".join(f"{text(place)} (rank {place[0]})" for place in _chain(cycle, waits_for))
            yield Violation(f"deadlock: {chain}", expected, *cycle[0])


def _chain(cycle: list[Place], waits_for: Callable[[Place], Place]) -> list[Place]:
    """The places of a cycle, whose each waits for what is behind the next, in the order in which they would have to
    run; the first comes again at the end.
    """
    chain = cycle[:1]
    for place in reversed(cycle):
        needed = waits_for(place)
        if needed != chain[-1]:
            chain.append(needed)
        chain.append(place)
    return chain
