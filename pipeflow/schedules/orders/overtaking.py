"""Large first: an order in which microbatches may overtake each other, for those that differ much. Must not contain:
where each microbatch gets its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from pipeflow.core.action import Action
from pipeflow.core.cost import CostModel
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.orders.problem import HALVES

# Theory of operation
#
# A microbatch that takes much longer than the others passes all stages one after the other, and so does its gradient. A
# step is short if this begins soon and nothing delays it. So of what a rank could run, it takes what belongs to a large
# microbatch that has begun. Forwards or input-gradient halves of the others come next, as asked; weight-gradient halves
# come last. The first stage takes forwards in the order of their numbers: small ones that come before a large one fill
# the ranks that it has not reached.

LARGE = 0.5  # the share of the largest factor from which a microbatch is large

Job = tuple[int, int, int, int]  # its class, microbatch, half and stage; a rank takes the least


def large_first(placement: Placement, cost: CostModel, *, forwards: bool) -> tuple[float, Schedule]:
    """A schedule for as many microbatches as `cost` has factors, and its makespan if no value waits for a link.
    `forwards` says whether they go before input-gradient halves where nothing large can run.
    """
    factors, ranks = cost.microbatch_factors, range(placement.num_ranks)
    classes, large = (1, 2, 3) if forwards else (2, 1, 3), LARGE * max(factors)
    rows: list[list[Action]] = [[] for _ in ranks]
    free = [0.0 for _ in ranks]
    arriving: list[list[tuple[float, Job]]] = [[] for _ in ranks]
    ready: list[list[Job]] = [[] for _ in ranks]
    for microbatch in range(len(factors)):
        ready[_rank(placement, 0, microbatch)].append((classes[0], microbatch, 0, 0))
    events = [(0.0, rank) for rank in ranks]
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        while arriving[rank] and arriving[rank][0][0] <= now:
            heappush(ready[rank], heappop(arriving[rank])[1])
        if not ready[rank]:
            continue
        _, microbatch, half, stage = heappop(ready[rank])
        rows[rank].append(Action(HALVES[half], stage, microbatch))
        free[rank] = end = now + cost.duration(HALVES[half], stage, microbatch)
        heappush(events, (end, rank))
        for later, its in _users(half, stage, placement.num_stages):
            user = _rank(placement, its, microbatch)
            arrival = end + _delay(cost, min(stage, its), rank, user, factors[microbatch])
            first = later < 2 and factors[microbatch] >= large
            heappush(arriving[user], (arrival, (0 if first else classes[later], microbatch, later, its)))
            heappush(events, (arrival, user))
    return max(free), Schedule("for lengths", placement, len(factors), tuple(map(tuple, rows)))


def _rank(placement: Placement, stage: int, microbatch: int) -> int:
    return placement.paths[microbatch % len(placement.paths)][stage]


def _users(half: int, stage: int, stages: int) -> Iterator[tuple[int, int]]:
    """The half and the stage of each action that uses what an action makes."""
    if half == 0:
        yield (0, stage + 1) if stage + 1 < stages else (1, stage)
    elif half == 1:
        yield 2, stage
        if stage:
            yield 1, stage - 1


def _delay(cost: CostModel, stage: int, sender: int, receiver: int, factor: float) -> float:
    """The time between the ranks of two neighbours, of which `stage` is the first; a gradient is as large as its
    activation.
    """
    if sender == receiver:
        return 0.0
    return cost.link(sender, receiver).latency + factor * cost.holding(stage, sender, receiver)
