"""Arrangement: microbatches that differ, formed from samples, and the place of each in a schedule. Must not contain:
which schedule it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from random import Random

from pipeflow.core.analysis.event_loop import transfers
from pipeflow.core.analysis.order import Order
from pipeflow.core.analysis.simulation import require_costs
from pipeflow.core.cost import CostModel
from pipeflow.core.liveness import ACTIVATIONS
from pipeflow.core.schedule import Schedule


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
    tuple[tuple[float, int], ...],
    tuple[int, ...],
    tuple[tuple[int, int, float, float], ...],
]
"""An entry of a row: its rank; the time of its action at factor 1, and its microbatch; the same of the other action of
a pair; the values that it waits for from other ranks; and those that other ranks wait for, each with its microbatch,
its latency and its time on the link. Plain tuples of numbers, which the garbage collector need not walk through.
"""


class Rerun:
    """A schedule without actions beside the computations, whose makespan is asked for under many factors. It is that of
    `simulate` if no value waits for a link that another one occupies. `kept` is the most activations of stages that a
    rank keeps. Raises UsageError for costs of another number of stages.
    """

    def __init__(self, schedule: Schedule, cost: CostModel) -> None:
        require_costs(schedule, cost)
        self.schedule, self._overlap = schedule, cost.overlap
        order = Order(schedule)
        moved = transfers(schedule, cost, order)
        passes = [move.link[0] != move.link[1] for move in moved]
        self._values, many = len(moved), schedule.num_microbatches
        rows = map(schedule.actions, range(len(schedule.rows)))
        self.kept = max(max(accumulate(ACTIVATIONS[action.kind] for action in row)) for row in rows)
        self._steps: list[Step] = [
            (
                rank,
                cost.duration(actions[0].kind, actions[0].stage),
                actions[0].microbatch,
                tuple((cost.duration(action.kind, action.stage), action.microbatch) for action in actions[1:]),
                tuple(value for value in needs if passes[value]),
                tuple(
                    (value, value % many, moved[value].latency, moved[value].held) for value in makes if passes[value]
                ),
            )
            for rank, actions, needs, makes in order
        ]

    def __len__(self) -> int:
        return len(self._steps)

    def makespan(self, factors: Sequence[float]) -> float:
        """The makespan if the microbatches have these factors."""
        there, free = [0.0] * self._values, [0.0] * len(self.schedule.rows)
        for rank, time, microbatch, others, needs, makes in self._steps:
            end = free[rank]
            for value in needs:
                if there[value] > end:
                    end = there[value]
            took = time * factors[microbatch]
            for other, its in others:
                took += other * factors[its] - self._overlap * min(took, other * factors[its])
            free[rank] = end = end + took
            for value, its, latency, held in makes:
                there[value] = end + held * factors[its] + latency
        return max(free)


def arrangements(factors: Sequence[float]) -> tuple[list[int], ...]:
    """Plain ones, as the microbatch at each place: small ones at both ends, where others wait for them; small ones
    first, and small ones last.
    """
    ascending = sorted(range(len(factors)), key=lambda microbatch: factors[microbatch])
    return ascending[::2] + ascending[1::2][::-1], ascending, ascending[::-1]


def rearranged(rerun: Rerun, factors: Sequence[float], order: list[int], tries: int, enough: float) -> list[int]:
    """`order`, or a better one that `tries` exchanges of two places lead to; it stops at the makespan `enough`."""
    random, best = Random(0), rerun.makespan([factors[microbatch] for microbatch in order])
    for _ in range(tries if len(order) > 1 else 0):
        if best <= enough:
            break
        one, other = random.sample(range(len(order)), 2)
        tried = order.copy()
        tried[one], tried[other] = order[other], order[one]
        makespan = rerun.makespan([factors[microbatch] for microbatch in tried])
        if makespan <= best:
            order, best = tried, makespan
    return order
