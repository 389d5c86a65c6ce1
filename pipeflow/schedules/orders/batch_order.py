"""Batch orders: the microbatches of a batch whose samples differ, and the schedule that runs them. Must not contain:
which schedules are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from pipeflow.core.analysis.memory_cap import MemoryCap, cap_per_rank
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules.orders.arrangement import Rerun, arrangements, balanced_groups, padded_groups, rearranged
from pipeflow.schedules.orders.lower_bounds import bounds, largest_microbatch
from pipeflow.schedules.orders.overtaking import large_first
from pipeflow.schedules.orders.problem import HALVES, ROUNDING, make_problem
from pipeflow.schedules.orders.search import improved

# Theory of operation
#
# All ranks must find the same order, and none waits for another one to find it. So a budget is no time: it is the
# number of actions that a usual processor can try in that time, however fast this one is. Named schedules are tried
# under a few arrangements of the microbatches, then places are exchanged. An order for these microbatches alone is only
# made where the bound leaves room. In most batches it does not, and a named schedule needs to be compiled only once.

RATE = 2_500_000  # actions of reruns in a second of budget
CANDIDATE = 12  # how many reruns take as long as one candidate of a search
BEGIN = 5  # how many candidates take as long as the begin and the end of a search
NEAR = 1.001  # times the shortest makespan, up to which a schedule is chosen for what it keeps
GAIN = 0.99  # times the makespan of a named schedule, below which one for this batch is worth being compiled


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """How to run one batch.

    Attributes:
        groups: per microbatch, the indices of its samples in the batch.
        schedule: the schedule that takes the microbatches in this order.
        cost: the costs, whose `microbatch_factors` are the cost of each microbatch over their mean.
        timeline: the simulated step.
        lower_bound: a makespan that no order of these microbatches goes below.
    """

    groups: tuple[tuple[int, ...], ...]
    schedule: Schedule
    cost: CostModel
    timeline: Timeline
    lower_bound: float

    @property
    def gap(self) -> float:
        """The makespan relative to the lower bound, minus 1."""
        return self.timeline.makespan / self.lower_bound - 1 if self.lower_bound else 0.0


def ordered(
    costs: Sequence[float],
    cost: CostModel,
    reruns: Sequence[Rerun],
    *,
    padded: bool,
    bytes_cap: MemoryCap | None,
    budget: float,
    searches: bool,
) -> BatchOrder:
    """The order of a batch whose samples have these `costs`, in the microbatches of the schedules of `reruns`. With
    `searches` other orders of actions are tried, too.
    """
    placement, many = reruns[0].schedule.placement, reruns[0].schedule.num_microbatches
    groups = (padded_groups if padded else balanced_groups)(costs, many)
    each = [[costs[index] for index in group] for group in groups]
    sums = [len(own) * max(own) if padded else sum(own) for own in each]
    cost = replace(cost, microbatch_factors=tuple(many * one / sum(sums) for one in sums))
    bound = _bound(placement, cost)
    choice = _chosen(reruns, cost, bytes_cap, bound, budget * RATE, searches=searches)
    timeline = simulate(choice.schedule, choice.cost)
    found = tuple(tuple(groups[microbatch]) for microbatch in choice.order)
    return BatchOrder(found, choice.schedule, choice.cost, timeline, min(bound, timeline.makespan))


def _bound(placement: Placement, cost: CostModel) -> float:
    """A lower bound for any order of the microbatches; for two paths, that of the work and of the largest one."""
    factors = cost.microbatch_factors
    if len(placement.paths) == 1:
        return bounds(make_problem(placement, len(factors), cost)).objective
    durations = [cost.duration(kind, stage) for stage in range(placement.num_stages) for kind in HALVES]
    work = sum(durations) * sum(factors) / placement.num_ranks
    return max(work, largest_microbatch(durations, factors, len(factors) // 2 - 1))


class _Choice(NamedTuple):
    """A schedule that takes the microbatches in an `order`, and the costs in that order."""

    makespan: float
    rerun: Rerun
    order: list[int]
    cost: CostModel

    @classmethod
    def of(cls, rerun: Rerun, order: list[int], cost: CostModel) -> _Choice:
        """With the `cost` before it is put in order."""
        factors = tuple(cost.microbatch_factors[microbatch] for microbatch in order)
        return cls(rerun.makespan(factors), rerun, order, replace(cost, microbatch_factors=factors))

    @property
    def schedule(self) -> Schedule:
        return self.rerun.schedule


def _chosen(
    reruns: Sequence[Rerun],
    cost: CostModel,
    bytes_cap: MemoryCap | None,
    bound: float,
    actions: float,
    *,
    searches: bool,
) -> _Choice:
    """The best choice that trying so many `actions` leads to."""
    plain = arrangements(cost.microbatch_factors)
    trials = [_Choice.of(rerun, order, cost) for rerun in reruns for order in plain]
    shortest = min(trial.makespan for trial in trials)
    trials.sort(key=lambda trial: (0, trial.rerun.kept) if trial.makespan <= NEAR * shortest else (1, trial.makespan))
    best = next((trial for trial in trials if _keeps(trial, bytes_cap)), None)
    left = actions - sum(len(trial.rerun) for trial in trials)
    if best is not None:
        tries = int(left / 4 / len(best.rerun))
        moved = _Choice.of(best.rerun, rearranged(best.rerun, cost.microbatch_factors, best.order, tries, bound), cost)
        best = moved if _keeps(moved, bytes_cap) else best
        if best.makespan * GAIN <= bound or not searches:
            return best
    found = _made(best or trials[0], cost, plain[:2], bytes_cap, left * 3 / 4) if searches else None
    if found is not None and (best is None or found.makespan < best.makespan * GAIN):
        return found
    if best is None:
        least = min(max(simulate(each.schedule, each.cost).peak_bytes) for each in trials)
        raise UsageError(f"none of the schedules keeps bytes_cap: the least cap that one keeps is {least:g}")
    return best


def _made(
    start: _Choice, cost: CostModel, orders: Sequence[list[int]], bytes_cap: MemoryCap | None, actions: float
) -> _Choice | None:
    """The best order that is made for these factors: large microbatches first or, where this keeps more than the cap,
    what a search finds from `start`. None if nothing does for two paths.
    """
    placement = start.schedule.placement
    put = [replace(cost, microbatch_factors=tuple(cost.microbatch_factors[each] for each in order)) for order in orders]
    found = [
        (*large_first(placement, its, forwards=forwards), order)
        for its, order in zip(put, orders, strict=True)
        for forwards in (True, False)
    ]
    _, schedule, order = min(found, key=lambda each: each[0])
    choice = _Choice.of(Rerun(schedule, replace(cost, microbatch_factors=())), order, cost)
    if _keeps(choice, bytes_cap):
        return choice
    return _searched(start, bytes_cap, max(1, _candidates(start, actions))) if len(placement.paths) == 1 else None


def _candidates(start: _Choice, actions: float) -> int:
    """How many candidates a search may try instead of so many actions of reruns."""
    halves = 3 * len(start.order) * start.schedule.placement.num_stages
    return int(actions / (CANDIDATE * halves)) - BEGIN


def _searched(start: _Choice, bytes_cap: MemoryCap | None, candidates: int) -> _Choice:
    """The order of actions that a search finds for the microbatches in the order of `start`."""
    problem = make_problem(start.schedule.placement, len(start.order), start.cost, bytes_cap=bytes_cap)
    found = improved(problem, start.cost, [start.schedule], deadline=inf, candidates=candidates, name="for lengths")
    rerun = Rerun(found.schedule, replace(start.cost, microbatch_factors=()))
    return _Choice(found.timeline.makespan, rerun, start.order, start.cost)


def _keeps(choice: _Choice, bytes_cap: MemoryCap | None) -> bool:
    """Whether each rank keeps no more than its cap."""
    if bytes_cap is None:
        return True
    peaks = simulate(choice.schedule, choice.cost).peak_bytes
    caps = cap_per_rank(bytes_cap, peaks, "bytes_cap")
    return all(peak <= cap * (1 + ROUNDING) for peak, cap in zip(peaks, caps, strict=True))
