"""Batch orders: the microbatches of a batch whose samples differ, and the schedule that runs them. Must not contain:
which named schedules are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, chain
from math import inf
from operator import mul
from random import Random
from statistics import fmean
from typing import NamedTuple

from pipeflow.core.action import Action
from pipeflow.core.analysis.order import Order
from pipeflow.core.analysis.simulation import require_costs, simulate, transfers
from pipeflow.core.cost import CostModel, pairing_of, slice_lengths, slice_works
from pipeflow.core.errors import UsageError
from pipeflow.core.factors import Factors, put_in_order, table_of
from pipeflow.core.liveness import ACTIVATIONS, MemoryCap, cap_per_rank
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules.orders.lower_bounds import bounds, largest_microbatch
from pipeflow.schedules.orders.problem import HALVES, ROUNDING, MemoryUse, arrangements, make_problem
from pipeflow.schedules.orders.search import improved

# Theory of operation
#
# All ranks must find the same order, and none waits for another one to find it. So a budget is no time: it is the
# number of actions that a usual processor can try in that time, however fast this one is. Named schedules are tried
# under a few arrangements of the microbatches, then places are exchanged. An order for these microbatches alone is only
# made where the bound leaves room. In most batches it does not, and a named schedule needs to be compiled only once.

RATE = 2_500_000  # actions of reruns in a second of budget
CANDIDATE = 12  # how many reruns take as long as one candidate of a search
PASS = 1.5  # how many candidates take as long as a pass that puts large microbatches first
BEGIN = 8  # how many candidates take as long as the begin and the end of a search
NEAR = 1.001  # times the shortest makespan, up to which a schedule is chosen for what it keeps
GAIN = 0.99  # times the makespan of a named schedule, below which one for this batch is worth being compiled


@dataclass(frozen=True)
class BatchOrder:
    """How to run one batch.

    Attributes:
        groups: per microbatch, the indices of its samples in the batch.
        schedule: the schedule that takes the microbatches in this order.
        cost: the costs, whose `microbatch_factors` are the cost of each microbatch over their mean.
        timeline: the simulated step, which is computed when it is first read.
        lower_bound: a makespan that no order of these microbatches goes below.
    """

    groups: tuple[tuple[int, ...], ...]
    schedule: Schedule
    cost: CostModel
    lower_bound: float

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.cost)

    @property
    def gap(self) -> float:
        """The makespan relative to the lower bound, minus 1."""
        return self.timeline.makespan / self.lower_bound - 1 if self.lower_bound else 0.0


def ordered(
    costs: Sequence[Sequence[float]],
    cost: CostModel,
    reruns: Sequence[Rerun],
    *,
    padded: bool,
    bytes_cap: MemoryCap | None,
    budget: float,
    searches: bool,
) -> BatchOrder:
    """The order of a batch whose samples have these `costs`, one row per stage or one for all, in the microbatches of
    the schedules of `reruns`. With `searches` other orders of actions are tried, too.
    """
    placement, many = reruns[0].schedule.placement, reruns[0].schedule.num_microbatches
    groups = (padded_groups if padded else balanced_groups)(_whole_costs(costs, cost), many)
    table = [tuple(_factors([[row[index] for index in group] for group in groups], padded=padded)) for row in costs]
    cost = replace(cost, microbatch_factors=tuple(table) if len(table) > 1 else table[0])
    bounds_of = {slices: _bound(placement, cost, slices) for slices in {rerun.schedule.slices for rerun in reruns}}
    choice = _chosen(reruns, cost, bytes_cap, bounds_of, budget * RATE, searches=searches)
    found = tuple(tuple(groups[microbatch]) for microbatch in choice.order)
    return BatchOrder(found, choice.schedule, choice.cost, min(choice.makespan, *bounds_of.values()))


def _whole_costs(costs: Sequence[Sequence[float]], cost: CostModel) -> Sequence[float]:
    """Per sample, its cost on all stages: of each, in proportion to the time of a mean microbatch."""
    if len(costs) == 1:
        return costs[0]
    shares = [sum(cost.duration(half, stage) for half in HALVES) / sum(row) for stage, row in enumerate(costs)]
    return [sum(map(mul, shares, sample)) for sample in zip(*costs, strict=True)]


def _factors(groups: Sequence[Sequence[float]], *, padded: bool) -> Iterator[float]:
    """The factor of each group of samples with these costs: its cost over the mean."""
    sums = [len(own) * max(own) if padded else sum(own) for own in groups]
    whole = sum(sums)
    return (len(sums) * one / whole for one in sums)


def _bound(placement: Placement, cost: CostModel, slices: int) -> float:
    """A lower bound for any order of microbatches of so many slices; for two paths, or several slices, that of the work
    and of the largest one.
    """
    many = len(cost.factors[0])
    if len(placement.paths) == slices == 1:
        return bounds(make_problem(placement, many, cost)).objective
    operations = [(kind, stage) for stage in range(placement.num_stages) for kind in HALVES]
    times = [[cost.duration(kind, stage) * factor for factor in cost.factors[stage]] for kind, stage in operations]
    if slices > 1:
        return _bound_of_slices(placement, times, min(slice_works(cost, slices)))
    work = sum(map(sum, times)) / placement.num_ranks
    return max(work, largest_microbatch(times, many // 2 - 1))


def _bound_of_slices(placement: Placement, times: Sequence[Sequence[float]], least: float) -> float:
    """A lower bound for slices of which each has at least the share `least` of its microbatch. `times` are those of F,
    I and W of each stage, per microbatch.

    A rank waits until the first slice has passed the stages before its own. All slices of a microbatch pass each stage,
    and one of them all others; its gradients start when its last slice has passed the last stage.
    """
    found = 0.0
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        before = min(map(sum, zip(*times[: 3 * stages[0] : 3], strict=True)), default=0.0)
        work = sum(sum(row) for stage in stages for row in times[3 * stage : 3 * stage + 3])
        found = max(found, least * before + work)
    for column in zip(*times, strict=True):
        ways = column[::3], column[1::3]
        path = sum(max(way) + least * (sum(way) - max(way)) for way in ways) + least * column[2]
        found = max(found, path)
    return found


class _Choice(NamedTuple):
    """A schedule that takes the microbatches in an `order`, and the costs in that order."""

    makespan: float
    rerun: Rerun
    order: list[int]
    cost: CostModel

    @classmethod
    def of(cls, rerun: Rerun, order: list[int], cost: CostModel) -> _Choice:
        """With the `cost` before it is put in order."""
        factors = put_in_order(cost.microbatch_factors, order)
        return cls(rerun.makespan(factors), rerun, order, replace(cost, microbatch_factors=factors))

    @property
    def schedule(self) -> Schedule:
        return self.rerun.schedule


def _chosen(
    reruns: Sequence[Rerun],
    cost: CostModel,
    bytes_cap: MemoryCap | None,
    bound: Mapping[int, float],
    actions: float,
    *,
    searches: bool,
) -> _Choice:
    """The best choice that trying so many `actions` leads to. `bound` has the lower bounds by numbers of slices."""
    *plain, third = arrangements([fmean(column) for column in zip(*cost.factors, strict=True)])
    trials = [
        _Choice.of(rerun, order, cost)
        for rerun in reruns
        for order in (plain if rerun.schedule.slices == 1 else plain[:1])  # of slices, order changes less
    ]
    shortest = min(trial.makespan for trial in trials)
    trials.sort(key=lambda trial: (0, trial.rerun.kept) if trial.makespan <= NEAR * shortest else (1, trial.makespan))
    best = next((trial for trial in trials if _keeps(trial, bytes_cap)), None)
    left = actions - sum(len(trial.rerun) for trial in trials)
    if best is not None:
        rerun, tries = best.rerun, int(left / 4 / len(best.rerun))
        order = rearranged(rerun, cost.microbatch_factors, best.order, tries, bound[rerun.schedule.slices])
        moved = _Choice.of(rerun, order, cost)
        best = moved if _keeps(moved, bytes_cap) else best
        if not searches or best.makespan * GAIN <= bound[1]:
            return best
    found = None
    if searches:
        whole = next(trial for trial in (best, *trials) if trial is not None and trial.schedule.slices == 1)
        found = _made(whole, cost, (*plain[:2], third), bytes_cap, left * 3 / 4)
    if found is not None and (best is None or found.makespan < best.makespan * GAIN):
        return found
    if best is None:
        least = min(max(simulate(each.schedule, each.cost).peak_bytes) for each in trials)
        raise UsageError(f"none of the schedules keeps bytes_cap: the least cap that one keeps is {least:g}")
    return best


def _made(
    start: _Choice, cost: CostModel, orders: Sequence[list[int]], bytes_cap: MemoryCap | None, actions: float
) -> _Choice | None:
    """The best order that is made for these factors: large microbatches first or, under a cap, also what a search finds
    from `start`. None for two paths if the former keeps more than the cap.
    """
    placement, memory = start.schedule.placement, None
    if bytes_cap is not None and len(placement.paths) == 1:
        memory = make_problem(placement, len(start.order), start.cost, bytes_cap=bytes_cap).memory
    found = []
    for order in orders if memory else orders[:2]:
        its = replace(cost, microbatch_factors=put_in_order(cost.microbatch_factors, order))
        found += [(_LargeFirst(placement, its, memory, classes), order) for classes in CLASSES]
    made, order = min(found, key=lambda each: each[0].makespan)
    choice = None
    if made.makespan < inf:
        choice = _Choice.of(Rerun(made.schedule(), replace(cost, microbatch_factors=())), order, cost)
        if memory is None:
            return choice if _keeps(choice, bytes_cap) else None
    searched = _searched(start, bytes_cap, max(1, _candidates(start, actions) - int(PASS * len(found))))
    return searched if choice is None or searched.makespan < choice.makespan else choice


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


def balanced_groups(costs: Sequence[float], groups: int) -> list[list[int]]:
    """The indices of `costs` in groups of like sums: each index, the largest cost first, goes into the group with the
    smallest sum so far. The largest sum is at most 4/3 of the least possible one (R. Graham, Bounds on multiprocessing
    timing anomalies, 1969). With as many costs as groups or more, no group is empty.
    """
    found: list[list[int]] = [[] for _ in range(groups)]
    sums = [(0.0, 0, group) for group in range(groups)]
    heapify(sums)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        total, many, group = sums[0]
        found[group].append(index)
        heapreplace(sums, (total + costs[index], many + 1, group))
    return found


def padded_groups(costs: Sequence[float], groups: int) -> list[list[int]]:
    """The indices of `costs` in groups whose largest cost times their size is alike: the least bound on it, found by
    bisection, under which groups of neighbours in descending order are no more than `groups`.
    """
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    low, high = 0.0, costs[order[0]] * len(costs)
    for _ in range(40):
        middle = (low + high) / 2
        if len(_within(costs, order, middle, groups)) <= groups:
            high = middle
        else:
            low = middle
    return _within(costs, order, high, groups)


def _within(costs: Sequence[float], order: list[int], bound: float, groups: int) -> list[list[int]]:
    """Groups within the bound, as few as possible but no fewer than `groups`; a larger cost has one alone."""
    found: list[list[int]] = []
    for place, index in enumerate(order):
        needed = groups - len(found) >= len(order) - place  # each of the rest needs a group of its own
        if not found or needed or costs[found[-1][0]] * (len(found[-1]) + 1) > bound:
            found.append([])
        found[-1].append(index)
    return found


Step = tuple[
    int,
    float,
    int,
    tuple[tuple[float, int, tuple[Action, ...]], ...],
    tuple[int, ...],
    tuple[tuple[int, int, float, float], ...],
]
"""An entry of a row: its rank; the time of its action at factor 1, and the place of its factor; the same of the other
action of a pair, with both actions; the values that it waits for from other ranks; and those that other ranks wait
for, each with the place of its factor, its latency and its time on the link. Factors are in one row, stage by stage.
"""


class Rerun:
    """A schedule without actions beside the computations, whose makespan is asked for under many factors. It is that of
    `simulate` if no value waits for a link that another one occupies. `kept` is the most activations of stages that a
    rank keeps, in microbatches. Raises UsageError for costs of another number of stages.
    """

    def __init__(self, schedule: Schedule, cost: CostModel) -> None:
        require_costs(schedule, cost)
        self.schedule, self._pairing = schedule, pairing_of(cost)
        order = Order(schedule)
        moved = transfers(schedule, cost, order)
        passes = [move.link[0] != move.link[1] for move in moved]
        self._values, many = len(moved), schedule.num_microbatches
        makers = [min(end.stage, end.of(0).user) for end in order.ends]  # of the activation, also for its gradient

        def place(action: Action) -> int:
            return action.stage * many + action.microbatch

        works: tuple[float, ...] = (1.0,)
        lengths = works
        if schedule.slices > 1:
            works, lengths = slice_works(cost, schedule.slices), slice_lengths(cost, schedule.slices)

        def time(action: Action) -> float:
            return cost.duration(action.kind, action.stage) * works[action.slice or 0]

        rows = map(schedule.actions, range(len(schedule.rows)))
        changes = ([ACTIVATIONS[each.kind] * lengths[each.slice or 0] for each in row] for row in rows)
        self.kept = max(max(accumulate(row)) for row in changes)
        self._steps: list[Step] = [
            (
                rank,
                time(actions[0]),
                place(actions[0]),
                tuple((time(action), place(action), actions) for action in actions[1:]),
                tuple(value for value in needs if passes[value]),
                tuple(
                    (value, makers[value // many] * many + value % many, moved[value].latency, moved[value].held)
                    for value in makes
                    if passes[value]
                ),
            )
            for rank, actions, needs, makes in order
        ]

    def __len__(self) -> int:
        return len(self._steps)

    def makespan(self, given: Factors) -> float:
        """The makespan if the microbatches have these factors."""
        stages = self.schedule.placement.num_stages
        factors = [*chain.from_iterable(table_of(given, stages))]
        there, free = [0.0] * self._values, [0.0] * len(self.schedule.rows)
        for rank, time, place, others, needs, makes in self._steps:
            end = free[rank]
            for value in needs:
                if there[value] > end:
                    end = there[value]
            took = time * factors[place]
            for other, its, pair in others:
                took = self._pairing.time(pair, took, other * factors[its])
            free[rank] = end = end + took
            for value, its, latency, held in makes:
                there[value] = end + held * factors[its] + latency
        return max(free)


def rearranged(rerun: Rerun, factors: Factors, order: list[int], tries: int, enough: float) -> list[int]:
    """`order`, or a better one that `tries` exchanges of two places lead to; it stops at the makespan `enough`."""
    random, best = Random(0), rerun.makespan(put_in_order(factors, order))
    for _ in range(tries if len(order) > 1 else 0):
        if best <= enough:
            break
        one, other = random.sample(range(len(order)), 2)
        tried = order.copy()
        tried[one], tried[other] = order[other], order[one]
        makespan = rerun.makespan(put_in_order(factors, tried))
        if makespan <= best:
            order, best = tried, makespan
    return order


# Theory of operation
#
# A microbatch that takes much longer than the others passes all stages one after the other, and so does its gradient. A
# step is short if this begins soon and nothing delays it. So of what a rank could run, it takes what belongs to a large
# microbatch that has begun. Forwards or input-gradient halves of the others come next, as asked; weight-gradient halves
# come last. The first stage takes forwards in the order of their numbers: small ones that come before a large one fill
# the ranks that it has not reached.

CLASSES = (1, 2, 3), (2, 1, 3)  # of F, I and W: forwards first, or input-gradient halves
LARGE = 0.5  # the share of the largest factor from which a microbatch is large

Job = tuple[int, int, int, int]  # its class, microbatch, half and stage; a rank takes the least


def large_first(
    placement: Placement, cost: CostModel, memory: MemoryUse | None = None, *, forwards: bool
) -> tuple[float, Schedule]:
    """A schedule for as many microbatches as `cost` has factors, and its makespan if no value waits for a link.
    `forwards` says whether they go before input-gradient halves where nothing large can run. With `memory`, a forward
    begins only where its rank has room for it, and no other one before a large one that waits for room. If ranks of
    several stages come to a standstill, the makespan is infinite.
    """
    found = _LargeFirst(placement, cost, memory, CLASSES[not forwards])
    return found.makespan, found.schedule()


class _LargeFirst:
    """A pass that puts large microbatches first. `classes` are those of F, I and W."""

    def __init__(
        self, placement: Placement, cost: CostModel, memory: MemoryUse | None, classes: tuple[int, int, int]
    ) -> None:
        ranks, sizes = range(placement.num_ranks), [max(column) for column in zip(*cost.factors, strict=True)]
        self.placement, self.cost, self.classes, self.memory = placement, cost, classes, memory
        self.large = [size >= LARGE * max(sizes) for size in sizes]
        self.times = [cost.durations[half] for half in HALVES]
        self.rows: list[list[Job]] = [[] for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.kept = [0.0 for _ in ranks]
        self.arriving: list[list[tuple[float, Job]]] = [[] for _ in ranks]
        self.ready: list[list[Job]] = [[] for _ in ranks]
        for microbatch in range(len(sizes)):
            self.ready[placement.rank_of(0, microbatch)].append((classes[0], microbatch, 0, 0))
        self.events = [(0.0, rank) for rank in ranks]
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.free[rank] and (job := self.next_job(now, rank)) is not None:
                self.start(now, rank, job)

    @property
    def makespan(self) -> float:
        """Infinite if ranks have come to a standstill."""
        whole = sum(map(len, self.rows)) == len(HALVES) * self.placement.num_stages * len(self.large)
        return max(self.free) if whole else inf

    def schedule(self) -> Schedule:
        """The actions that ran, as a schedule."""
        rows = (
            tuple(Action(HALVES[half], stage, microbatch) for _, microbatch, half, stage in row) for row in self.rows
        )
        return Schedule("for lengths", self.placement, len(self.large), tuple(rows))

    def next_job(self, now: float, rank: int) -> Job | None:
        """The job that a free rank takes."""
        arriving, ready = self.arriving[rank], self.ready[rank]
        while arriving and arriving[0][0] <= now:
            heappush(ready, heappop(arriving)[1])
        if self.memory is None:
            return heappop(ready) if ready else None
        left, waits, found = list[Job](), False, None
        while ready and found is None:
            job = heappop(ready)
            _, microbatch, half, _ = job
            if (waits and not half) or not self._has_room(rank, job):
                waits = waits or (self.large[microbatch] and not half)
                left.append(job)
            else:
                found = job
        for job in left:
            heappush(ready, job)
        return found

    def _has_room(self, rank: int, job: Job) -> bool:
        """Whether what a job keeps, when it starts and then when it ends, fits beside what its rank keeps."""
        assert self.memory is not None
        _, microbatch, half, stage = job
        factor, operation = self.cost.factor(stage, microbatch), 3 * stage + half
        begins, ends = self.memory.at_start[operation] * factor, self.memory.at_end[operation] * factor
        room = self.memory.room[rank] - (0.0 if half else self.memory.spare[rank])
        return self.kept[rank] + begins + max(ends, 0.0) <= room

    def start(self, now: float, rank: int, job: Job) -> None:
        """Runs a job, and sends what it makes to its users."""
        _, microbatch, half, stage = job
        factors, path = self.cost.factors, self.placement.paths[microbatch % len(self.placement.paths)]
        self.rows[rank].append(job)
        if self.memory is not None:
            change = self.memory.at_start[3 * stage + half] + self.memory.at_end[3 * stage + half]
            self.kept[rank] += change * factors[stage][microbatch]
        self.free[rank] = end = now + self.times[half][stage] * factors[stage][microbatch]
        heappush(self.events, (end, rank))
        for later, its in _users(half, stage, len(path)):
            user, sender, arrival = path[its], min(stage, its), end
            if user != rank:
                link = self.cost.link(rank, user)
                arrival += link.latency + self.cost.holding(sender, rank, user) * factors[sender][microbatch]
            its_class = 0 if later < 2 and self.large[microbatch] else self.classes[later]
            heappush(self.arriving[user], (arrival, (its_class, microbatch, later, its)))
            heappush(self.events, (arrival, user))


def _users(half: int, stage: int, stages: int) -> Iterator[tuple[int, int]]:
    """The half and the stage of each action that uses what an action makes."""
    if half == 0:
        yield (0, stage + 1) if stage + 1 < stages else (1, stage)
    elif half == 1:
        yield 2, stage
        if stage:
            yield 1, stage - 1
