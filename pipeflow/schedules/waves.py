"""Chimera and Hanayo: waves of microbatches that cross in the pipeline, so that one fills the gaps of the other.

In Chimera they start from both ends, each through a copy of the model. In Hanayo they go down the ranks and back up,
through one copy.
"""

from __future__ import annotations

from heapq import heappop, heappush

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import sources
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.row_parts import require_even


def chimera(ranks: int, microbatches: int) -> Schedule:
    """1F1B from both ends of the pipeline at once.

    A rank holds one stage of each direction. Even microbatches enter at rank 0, odd ones at the last rank, R/2 of each
    at a time. A rank runs a backward if one can start, otherwise a forward. In both cases it takes the earliest
    microbatch.

    Source: Chimera, arXiv 2107.06925: its basic unit of R microbatches, followed by others by direct concatenation. The
    number of ranks R must be even, otherwise UsageError. B is the time of a whole backward. With M a multiple of R and
    B >= F, the bubble is (R-2)(B + (M/R-1)(B-F)), which is (R-2)F if B = F. The peak is R/2 + 1 + min(r, R-1-r)
    activations on rank r. There are two copies of the weights. In the picture, lower case is the later stage.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(chimera(4, 4))))
    rank 0  F0 F2 .  f1 b1--- f3 b3--- .  B0--- .  .  B2---
    rank 1  .  F0 f1 F2 f3 .  b1--- B0--- b3--- B2--- .  .
    rank 2  .  F1 f0 F3 f2 .  b0--- B1--- b2--- B3--- .  .
    rank 3  F1 F3 .  f0 b0--- f2 b2--- .  B1--- .  .  B3---
    """
    require_even("chimera", ranks)
    return _backward_first("chimera", Placement.bidirectional(ranks), microbatches)


def hanayo(ranks: int, microbatches: int, *, waves: int = 1) -> Schedule:
    """1F1B in waves that go down the ranks and back up.

    Rank r holds stages r, 2R-1-r, 2R+r and so on, two for each of the `waves`. At most R microbatches are in the
    pipeline at a time. A rank runs a backward if one can start, otherwise a forward. In both cases it takes the
    earliest microbatch.

    Source: Hanayo, arXiv 2308.15762. W is the number of waves, and B the time of a whole backward. With R ranks, M a
    multiple of R and B >= F, the bubble is (R-1)(B + (M/R-1)(B-F))/W, which is (R-1)F/W if B = F. The peak is (2W-1)R +
    r + 1 chunk activations on rank r, of at most R microbatches. One wave is Chimera with its two directions folded
    onto one copy of the weights. In the picture, lower case is the way up.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(hanayo(4, 4))))
    rank 0  F0 F1 F2 F3 .  .  .  f0 b0--- f1 b1--- f2 b2--- f3 b3--- .  .  .  B0--- .  .  B1--- .  .  B2--- .  .  B3---
    rank 1  .  F0 F1 F2 F3 .  f0 .  f1 .  b0--- f2 b1--- f3 b2--- .  .  B0--- b3--- B1--- .  .  B2--- .  .  B3--- .  .
    rank 2  .  .  F0 F1 F2 f0 F3 f1 .  f2 .  .  b0--- f3 b1--- .  B0--- b2--- B1--- b3--- B2--- .  .  B3--- .  .  .  .
    rank 3  .  .  .  F0 f0 F1 f1 F2 f2 F3 f3 .  .  .  b0--- B0--- b1--- B1--- b2--- B2--- b3--- B3--- .  .  .  .  .  .
    """
    return _backward_first("hanayo", Placement.zigzag(ranks, waves), microbatches)


def _backward_first(name: str, placement: Placement, microbatches: int) -> Schedule:
    """In each pass, every rank runs a backward if one can start, otherwise a forward. In both cases it takes the
    earliest microbatch.

    The pipeline holds as many microbatches as there are ranks: when one leaves, the next one enters.
    """
    ranks = placement.num_ranks
    follows = {maker: user for user, maker in sources((Kind.F, Kind.B), placement.num_stages).items()}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    startable: list[list[tuple[Kind, int, int]]] = [[] for _ in range(ranks)]  # heaps, in which B comes before F
    starts = [Action(Kind.F, 0, microbatch) for microbatch in range(ranks)]
    while starts:
        for action in starts:
            if action.microbatch < microbatches:
                rank = placement.rank_of(action.stage, action.microbatch)
                heappush(startable[rank], (action.kind, action.microbatch, action.stage))
        starts = []
        for row, heap in zip(rows, startable, strict=True):
            if heap:
                kind, microbatch, stage = heappop(heap)
                row.append(Action(kind, stage, microbatch))
                if following := follows.get((kind, stage)):
                    starts.append(Action(*following, microbatch))
                else:  # the microbatch has left, so another one enters
                    starts.append(Action(Kind.F, 0, microbatch + ranks))
    return Schedule(name, placement, microbatches, tuple(map(tuple, rows)))
