"""Bounds: the least time that a step can take under a placement, whatever its order. Must not contain: orders, and
what actions cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.placement import Placement


def least_makespan(cost: CostModel, placement: Placement, microbatches: int, *, split: bool) -> float:
    """A lower bound on the makespan of all schedules with this placement, including reductions. It assumes that pairs
    save no time.

    A rank cannot start before a first forward has reached one of its stages. It then computes all of its work. After
    the last whole backward of a stage, the stages before it still have to run their backwards. With `split` backwards,
    the last action may be a weight-gradient half, which no other action waits for. A reduction follows the last weight
    gradient of its stage. With whole backwards, free transfers and equal stages, the bound is the makespan of 1F1B,
    interleaved 1F1B and GPipe.
    """
    forward, backward = cost.durations[Kind.F], cost.durations[Kind.B]
    gradient = cost.durations[Kind.I] if split else backward  # what a stage before waits for
    work = [0.0] * placement.num_ranks
    start, end = [inf] * placement.num_ranks, [inf] * placement.num_ranks
    through = 0.0
    for number, path in enumerate(placement.paths[:microbatches]):
        links = [(stage, one, other) for stage, (one, other) in enumerate(pairwise(path))]
        down = [0.0 if one == other else cost.transfer(stage, one, other) for stage, one, other in links]
        up = [0.0 if one == other else cost.transfer(stage, other, one) for stage, one, other in links]
        first, after = _before(forward, down), _before(gradient, up)
        many = len(range(number, microbatches, len(placement.paths)))
        for stage, rank in enumerate(path):
            work[rank] += many * (forward[stage] + backward[stage])
            start[rank] = min(start[rank], first[stage])
            end[rank] = min(end[rank], max(0.0 if split else after[stage], cost.durations[Kind.R][stage]))
        alone = first[-1] + forward[-1] + gradient[-1] + after[-1] + (cost.durations[Kind.W][0] if split else 0.0)
        through = max(through, alone)
    return max(through, *map(sum, zip(start, work, end, strict=True)))


def _before(times: Sequence[float], transfers: Sequence[float]) -> list[float]:
    """Per stage, the time of all stages before it and of the transfers up to it."""
    return [0.0, *accumulate(time + transfer for time, transfer in zip(times, transfers, strict=False))]
