"""Search with kinds of actions that save memory: the best order within the room of each rank, together with what is
copied to the host and what is computed again. Must not contain: which schedules it starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, pairwise, zip_longest
from math import inf
from random import Random
from time import perf_counter

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import SMALLEST, CostModel, pairing_of
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules.orders.additions import with_recompute
from pipeflow.schedules.orders.list_scheduling import Builder
from pipeflow.schedules.orders.lower_bounds import bounds
from pipeflow.schedules.orders.offloading import with_offload
from pipeflow.schedules.orders.problem import (
    ROUNDING,
    Operations,
    Problem,
    amounts,
    keeps_within,
    to_sequences,
    with_hidden,
)
from pipeflow.schedules.orders.rules import Rules, plain_rules, varied
from pipeflow.schedules.orders.search import (
    PROPOSALS,
    ROUND,
    Found,
    critical_blocks,
    longest,
    measured,
    neighbour,
)
from pipeflow.schedules.orders.spilling import Place, Spilled, Storage, spilled, to_spilled_schedule

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
    of their simple uses within it.

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
    for schedule in sorted(given, key=lambda each: simulate(each, cost).makespan):
        best.use(schedule)
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


@dataclass(slots=True)
class Best:
    """The best schedule that was found within the room of each rank.

    Attributes:
        storage: the problem, and the room.
        cost: the costs of simulations.
        name: of the schedule.
        found: the best schedule. None: there is none yet.
        order: the best of the orders that were spilled, from which moves start.
        least: the least that any schedule keeps on the rank that keeps most.
        bound: a lower bound on the objective of all schedules without pairs.
    """

    storage: Storage
    cost: CostModel
    name: str
    found: Found | None = None
    order: Spilled | None = None
    least: float = inf
    bound: float = field(init=False)
    _hidden: float = field(init=False)

    def __post_init__(self) -> None:
        problem = self.storage.problem
        self.bound = self._hidden = bounds(problem).objective
        if pairing_of(self.cost).hides:
            self._hidden = bounds(with_hidden(problem, self.cost)).objective

    @property
    def objective(self) -> float:
        """The objective of the best schedule."""
        return inf if self.found is None else measured(self.found.timeline, self.found.objective)

    @property
    def is_proved(self) -> bool:
        """Whether no schedule can be better."""
        return self.objective <= self.bound * (1 + 1e-12)

    def offer(self, schedule: Schedule, timeline: Timeline) -> bool:
        """Takes a schedule if it keeps within the room and is better than the best; whether it keeps within."""
        problem = self.storage.capped
        self.least = min(self.least, max(amounts(problem, timeline)))
        if not keeps_within(problem, timeline):
            return False
        objective = measured(timeline, problem.objective)
        second = inf if self.found is None else self.found.timeline.makespan + self.found.timeline.span
        if (objective, timeline.makespan + timeline.span) < (self.objective, second):
            bound = self._hidden if schedule.has_pairs else self.bound
            schedule, timeline = replace(schedule, name=self.name), replace(timeline, name=self.name)
            self.found = Found(schedule, timeline, min(bound, objective), problem.objective)
        return True

    def start(self, schedule: Schedule) -> None:
        """Spills the order of a schedule, also with chunks that are computed again."""
        sequences = to_sequences(schedule)
        self.spill(sequences, {}, self.objective)
        if self.storage.recomputes:
            for stages in chunk_sets(schedule.placement):
                places = ((stage, each) for stage in stages for each in range(schedule.num_microbatches))
                self.spill(sequences, {place: self.storage.needs(place).again for place in places}, self.objective)

    def use(self, schedule: Schedule) -> None:
        """Offers a schedule and its simple uses, as far as they are shorter than the best: with chunks computed again,
        and where that keeps too much, with chunks offloaded, first all of them.
        """
        chunks, storage = chunk_sets(schedule.placement), self.storage
        again = [with_recompute(schedule, stages) for stages in chunks] if storage.recomputes else []
        for each in (schedule, *again):
            timeline = simulate(each, self.cost)
            if measured(timeline, storage.problem.objective) >= self.objective or self.offer(each, timeline):
                continue
            if storage.offloads and all(_may_keep(storage, timeline, ranks) for ranks in storage.links):
                for stages in reversed(chunks):
                    offloaded = with_offload(each, self.cost, stages)
                    self.offer(offloaded, simulate(offloaded, self.cost))

    def spill(self, sequences: Sequence[Operations], again: Mapping[Place, float], stop: float) -> Spilled | None:
        """Spills an order, and offers it if it is better than the best. None if its simulation keeps too much, because
        copies come in another order than planned.
        """
        found = spilled(self.storage, sequences, again, stop)
        if found is None or found.objective > self.objective:
            return found
        schedule = to_spilled_schedule(self.name, self.storage, found)
        if not self.offer(schedule, simulate(schedule, self.cost)):
            return None
        self.order = found if self.order is None or found[:2] <= self.order[:2] else self.order
        return found


FEW = 3  # chunks per rank, up to which every subset is used


def chunk_sets(placement: Placement) -> list[tuple[int, ...]]:
    """The stages of sets of chunks, the same on all ranks, from small to large: every set of up to `FEW` chunks per
    rank, else the first ones and the last ones.
    """
    stages = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    chunks = max(map(len, stages))
    sets = [own for number in range(1, chunks + 1) for own in combinations(range(chunks), number)]
    if chunks > FEW:
        every = tuple(range(chunks))
        sets = [*(own for number in range(1, chunks) for own in (every[:number], every[-number:])), every]
    return [tuple(own[chunk] for own in stages for chunk in each if chunk < len(own)) for each in sets]


def _may_keep(storage: Storage, timeline: Timeline, ranks: Sequence[int]) -> bool:
    """Whether offloads may keep the ranks of a link within their room. They cannot where, even if copies ran all the
    time from the end of the first forward on, these ranks together would keep too much.
    """
    stages = [stage for rank in ranks for stage in storage.problem.stages[rank]]
    first = min(span.end for rank in ranks for span in timeline.rows[rank][:1])
    rates = (storage.stage_needs[stage].saved / (storage.stage_needs[stage].out or SMALLEST) for stage in stages)
    rate = max(rates)
    most, unit = sum(storage.room[rank] for rank in ranks), storage.problem.memory.unit or 1
    changes: list[tuple[float, float]] = []
    for rank in ranks:
        curve = [(0.0, 0.0), *timeline.memory(rank)]
        changes += ((time, (after - before) * unit) for (_, before), (time, after) in pairwise(curve))
    kept = 0.0
    for time, change in sorted(changes):
        kept += change
        if kept - rate * max(time - first, 0.0) > most:
            return False
    return True
