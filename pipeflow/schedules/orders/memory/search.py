"""Search with kinds of actions that save memory: the best order within the room of each rank, together with what is
copied to the host and what is computed again. Must not contain: which schedules it starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from math import inf
from random import Random
from time import perf_counter

from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.orders.filling import Builder
from pipeflow.schedules.orders.list_scheduling import Rules
from pipeflow.schedules.orders.lower_bounds import bounds
from pipeflow.schedules.orders.memory.best import Best
from pipeflow.schedules.orders.memory.spilling import Spilled
from pipeflow.schedules.orders.memory.storage import Storage
from pipeflow.schedules.orders.neighbours import critical_blocks, neighbour
from pipeflow.schedules.orders.problem import ROUNDING, Problem
from pipeflow.schedules.orders.rules import plain_rules, varied
from pipeflow.schedules.orders.search import PROPOSALS, ROUND, Found, longest

# Theory of operation
#
# An order of F, I and W alone comes first, as in `search`, but from rules with more room than there is. Then `spilled`
# decides what leaves the ranks. That takes longer than the order itself, and is left out where the order alone is too
# long. The grid of rules is tried for several rooms. Then, in turn, the best rules are varied, and moves change the
# best order and what is computed again in it. Every order that is better than the best so far is simulated as a
# schedule, because links between ranks may be occupied, and copies may come in another order than planned.

ROOMS = (1.0, 1.25, 1.5, 2.0, 3.0)  # times the room of each rank, for orders before they are spilled
FORGOTTEN = (0, 0, 1, 1, 2, 4)  # how many recomputations a move takes away


class NoOrderError(UsageError):
    """No order was found that keeps within a cap."""


def improved_with_memory(
    storage: Storage,
    cost: CostModel,
    start: Sequence[Schedule],
    *,
    deadline: float,
    candidates: int | None,
    name: str,
    known: Found | None = None,
) -> Found:
    """The best schedule within the room of `storage` that is found until `deadline`, a time of `perf_counter`, and
    within a number of `candidates`. It is never worse than `known`, than one of `start` within the room, and than one
    of their simple uses (`simple_uses`) within it.

    Raises UsageError for fewer than one candidate, and NoOrderError if nothing keeps within the room, with the least
    that a schedule was found to keep.
    """
    if candidates is not None:
        require_positive(candidates=candidates)
    best = Best(storage, cost, name)
    if known is not None:
        best.offer(known.schedule, known.timeline)
    given = [schedule.without_reductions() for schedule in start]
    for schedule in given:
        best.start(schedule)
    best.use_all(given)
    tried = 0

    def goes_on() -> bool:
        nonlocal tried
        tried += 1
        within = tried <= (inf if candidates is None else candidates)
        return within and not best.is_proved and perf_counter() < deadline

    if goes_on():
        _searched(best, goes_on)
    if best.found is None:
        least = min(best.least, max(storage.problem.least))  # or one microbatch at a time, without any kind
        raise NoOrderError(
            f"no order was found that keeps within the cap: of those that are known, the one that keeps least needs "
            f"{least / (storage.problem.memory.unit or 1):g} on the rank that keeps most"
        )
    return best.found


def _searched(best: Best, goes_on: Callable[[], bool]) -> None:
    builders = [Builder.of(problem, bounds(problem)) for problem in _roomy(best.storage)]
    top: tuple[float, Builder, Rules] | None = None
    for builder, rules in _grid(builders):
        if not goes_on():
            return
        found = _ruled(best, builder, rules, best.objective)
        if found is not None and (top is None or found.objective < top[0]):
            top = found.objective, builder, rules
    random = Random(0)
    by_rules = None if top is None else _rule_climb(best, *top, random)
    while by_rules or best.order:
        climbs = [each for each in (by_rules, _move_climb(best, random)) if each]
        for climb in climbs * ROUND:
            if not goes_on():
                return
            climb()


def _roomy(storage: Storage) -> Iterator[Problem]:
    """The problems of orders that are spilled: `ROOMS`, at least enough for a microbatch, as far as they differ."""
    problem, many = storage.problem, storage.problem.num_microbatches
    tried = set()
    for factor in ROOMS:
        limits = zip(storage.room, problem.least, strict=True)
        room = tuple(min(max(factor * most, need), many * need) * (1 + ROUNDING) for most, need in limits)
        if room not in tried:
            tried.add(room)
            yield replace(problem, memory=replace(problem.memory, room=room))


def _grid(builders: Sequence[Builder]) -> Iterator[tuple[Builder, Rules]]:
    """The plain rules of each builder, in turn."""
    rules = [((builder, each) for each in plain_rules(builder.alike, builder.heads)) for builder in builders]
    return filter(None, chain.from_iterable(zip_longest(*rules)))


def _ruled(best: Best, builder: Builder, rules: Rules, stop: float) -> Spilled | None:
    """The order that rules lead to, spilled."""
    order = builder.candidate(rules, stop)
    return None if order is None else best.spill(order.sequences, {}, stop)


Climb = Callable[[], None]


def _rule_climb(best: Best, objective: float, builder: Builder, rules: Rules, random: Random) -> Climb:
    """Varies rules, and goes on from those whose order is hardly worse."""

    def climb() -> None:
        nonlocal objective, rules
        tried = varied(rules, builder.alike, random)
        found = _ruled(best, builder, tried, longest(objective, random))
        if found is not None:
            objective, rules = found.objective, tried

    return climb


def _move_climb(best: Best, random: Random) -> Climb | None:
    """Moves operations of the best order, takes recomputations away, and goes on from orders that are hardly worse."""
    if best.order is None:
        return None
    problem, current = best.storage.problem, best.order

    def climb() -> None:
        nonlocal current
        blocks = critical_blocks(problem, current.sequences, current.times)
        again = sorted(current.again)
        for _ in range(PROPOSALS if blocks else 0):
            sequences = neighbour(problem, current.sequences, blocks, random)
            if sequences is not None:
                gone = random.sample(again, min(len(again), random.choice(FORGOTTEN)))
                kept = {place: current.again[place] for place in again if place not in gone}
                current = best.spill(sequences, kept, longest(current.objective, random)) or current
                return

    return climb
