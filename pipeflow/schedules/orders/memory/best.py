"""The best schedule of a search with kinds that save memory: orders are spilled and simulated. Must not contain: which
orders are tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules.orders.lower_bounds import bounds
from pipeflow.schedules.orders.memory.simple_uses import chunk_sets, may_keep, offloaded_uses, recomputed_uses
from pipeflow.schedules.orders.memory.spilling import Spilled, spilled, to_spilled_schedule
from pipeflow.schedules.orders.memory.storage import Place, Storage
from pipeflow.schedules.orders.problem import Operations, amounts, keeps_within, to_sequences, with_hidden
from pipeflow.schedules.orders.search import Found, has_pairs, measured


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
        if self.cost.overlap:
            self._hidden = bounds(with_hidden(problem, self.cost.overlap)).objective

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
        if (objective, timeline.makespan + timeline.span) < (self.objective, self._second):
            bound = self._hidden if has_pairs(schedule) else self.bound
            schedule, timeline = replace(schedule, name=self.name), replace(timeline, name=self.name)
            self.found = Found(schedule, timeline, min(bound, objective), problem.objective)
        return True

    @property
    def _second(self) -> float:
        return inf if self.found is None else self.found.timeline.makespan + self.found.timeline.span

    def start(self, schedule: Schedule) -> None:
        """Spills the order of a schedule, also with chunks that are computed again."""
        sequences = to_sequences(schedule)
        self.spill(sequences, {}, self.objective)
        if self.storage.recomputes:
            for stages in chunk_sets(schedule.placement):
                places = ((stage, each) for stage in stages for each in range(schedule.num_microbatches))
                self.spill(sequences, {place: self.storage.times(place).again for place in places}, self.objective)

    def use_all(self, schedules: Sequence[Schedule]) -> None:
        """Offers schedules and their simple uses, as far as they are shorter than the best: the shortest first."""
        for schedule in sorted(schedules, key=lambda each: simulate(each, self.cost).makespan):
            self._use(schedule)

    def _use(self, schedule: Schedule) -> None:
        for each in chain((schedule,), recomputed_uses(schedule) if self.storage.recomputes else ()):
            timeline = simulate(each, self.cost)
            is_shorter = measured(timeline, self.storage.problem.objective) < self.objective
            if is_shorter and not self.offer(each, timeline) and may_keep(self.storage, timeline):
                for use in offloaded_uses(each, self.cost):
                    self.offer(use, simulate(use, self.cost))

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
