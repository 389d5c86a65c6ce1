"""1F1B: each backward as soon as possible, so that few activations are kept."""

from __future__ import annotations

from pipeflow.core.action import Action, Kind
from pipeflow.core.placement import Placement, require_at_least, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.row_parts import in_turn, parts


def one_f_one_b(ranks: int, microbatches: int, *, extra_warmup: int = 0, slices: int = 1) -> Schedule:
    """One forward and one backward in turn, so that few activations are kept.

    Warm-up: one forward for each rank after this one. Steady state: a forward and a backward in turn. Cool-down: the
    remaining backwards. `extra_warmup` adds forwards to the warm-up, at most one for each rank after this one. Each of
    them costs an activation and hides part of a slow transfer. eager-1f1b has the largest number that helps.

    Source: PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473, section 2.2.1. With R ranks and M
    microbatches, the bubble is (R-1)(F+B), as in GPipe. The peak is min(R-r + min(extra_warmup, R-r-1), M) activations
    on rank r. `slices` cuts each microbatch, as in seq1f1b.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(one_f_one_b(4, 4))))
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- .  B1--- .  B2--- .  B3---
    rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3--- .  .
    rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .  .  .
    """
    require_at_least(0, extra_warmup=extra_warmup)
    return _one_in_turn("1f1b", ranks, microbatches, extra_warmup=extra_warmup, slices=slices)


def eager_one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, which hides slow transfers.

    If a transfer takes time c, the steady state of 1F1B waits for it at every microbatch. The path of a microbatch to
    the last rank and back has no slack. More forwards in the warm-up add slack.

    Source: the warm-up of Megatron-LM's interleaved schedule, arXiv 2104.04473, section 2.2.2, for one chunk. With R
    ranks and M microbatches, the bubble is (R-1)(F+B), plus 2(R-1)c if M >= 2R. The peak is min(2(R-r)-1, M)
    activations on rank r.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(eager_one_f_one_b(4, 4))))
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- .  B1--- .  B2--- .  B3---
    rank 1  .  F0 F1 F2 F3 .  .  .  B0--- .  B1--- .  B2--- .  B3--- .  .
    rank 2  .  .  F0 F1 F2 .  B0--- F3 B1--- .  B2--- .  B3--- .  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .  .  .
    """
    return _one_in_turn("eager-1f1b", ranks, microbatches, extra_warmup=ranks)


def seq1f1b(ranks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """1F1B over slices of each sequence: a smaller bubble, and less memory.

    It cuts each microbatch of a causal model into q `slices`. A forward needs keys and values of earlier slices. A
    backward needs their gradient from later slices, so backwards begin with the last one. The warm-up is that of 1F1B
    with q - 1 more forwards. With one slice, the default, it is 1F1B.

    Source: Seq1F1B, arXiv 2406.03488. With R ranks, M microbatches and slices of equal cost, the bubble is
    (R-1)(F+B)/q. The peak is min(R-r+q-1, Mq) slices on rank r. Equally long slices of a causal model do not cost the
    same: `pipeflow.equal_slices` cuts them so that they do. `CostModel` has the share of attention.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(seq1f1b(4, 2, slices=2))))
    rank 0  F0.0 F0.1 F1.0 F1.1 .    .    .    .    .    .    .    B0.1----- .    B0.0----- .    B1.1----- B1.0-----
    rank 1  .    F0.0 F0.1 F1.0 F1.1 .    .    .    .    B0.1----- .    B0.0----- .    B1.1----- B1.0----- .    .
    rank 2  .    .    F0.0 F0.1 F1.0 .    .    B0.1----- F1.1 B0.0----- .    B1.1----- B1.0----- .    .    .    .
    rank 3  .    .    .    F0.0 F0.1 B0.1----- F1.0 B0.0----- F1.1 B1.1----- B1.0----- .    .    .    .    .    .
    """
    return _one_in_turn("seq1f1b", ranks, microbatches, extra_warmup=0, slices=slices)


def _one_in_turn(name: str, ranks: int, microbatches: int, *, extra_warmup: int, slices: int = 1) -> Schedule:
    require_positive(slices=slices)

    def row(rank: int) -> tuple[Action, ...]:
        forwards, backwards = (parts(kind, rank, microbatches, slices) for kind in (Kind.F, Kind.B))
        following = ranks - rank - 1
        return tuple(in_turn(following + min(extra_warmup, following) + slices - 1, forwards, backwards))

    rows = tuple(row(rank) for rank in range(ranks))
    return Schedule(name, Placement.linear(ranks), microbatches, rows, slices)
