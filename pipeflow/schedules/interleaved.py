"""Interleaved 1F1B: several stages per rank, so that the pipeline fills in smaller steps."""

from __future__ import annotations

from pipeflow.core.action import Entry, Kind
from pipeflow.core.placement import Placement, require_at_least, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.row_parts import existing, group_size, in_groups, in_turn, lead


def interleaved_one_f_one_b(
    ranks: int, microbatches: int, *, chunks: int = 2, group: int | None = None, extra_warmup: int = 0, slices: int = 1
) -> Schedule:
    """1F1B over several stages per rank, so that the pipeline fills in smaller steps.

    Microbatches go through a rank's chunks in groups of g (`group`, at least R; default: R). A group runs through chunk
    0, then through chunk 1, and so on. Its backwards start at the last chunk. If M is not a multiple of g, the last
    group is padded, and the microbatches that do not exist are left out.

    Source: Megatron-LM, arXiv 2104.04473, section 2.2.2. With R ranks, v chunks and M a multiple of g, the bubble is
    (R-1)(F+B)/v. The peak is min(2(R-r-1) + (v-1)g + 1, Mv) chunk activations on rank r. In the picture, lower case is
    chunk 1.

    A larger group leaves more time between two chunks of a rank, which hides slow transfers. Every rank first runs
    `extra_warmup` additional forwards. Each of them costs an activation, but no time if M is a multiple of g and
    transfers are free. With one of them, adjacent forwards and backwards are of different microbatches, also on the
    last rank. So they can overlap, as in Megatron-core's combined 1F1B. `slices` cuts each microbatch, as in seq1f1b; a
    group then has slices.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(interleaved_one_f_one_b(4, 4, chunks=2))))
    rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  .  .  .  b0--- .  b1--- .  b2--- .  b3--- B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0--- .  b1--- .  b2--- .  b3--- B0--- B1--- B2--- B3--- .  .
    rank 2  .  .  F0 F1 F2 F3 f0 f1 f2 .  b0--- f3 b1--- .  b2--- .  b3--- B0--- B1--- B2--- B3--- .  .  .  .
    rank 3  .  .  .  F0 F1 F2 F3 f0 b0--- f1 b1--- f2 b2--- f3 b3--- B0--- B1--- B2--- B3--- .  .  .  .  .  .
    """
    require_positive(chunks=chunks)
    require_at_least(0, extra_warmup=extra_warmup)
    require_positive(slices=slices)
    size = group_size(group, ranks=ranks, microbatches=microbatches * slices, least=ranks)

    def row(rank: int) -> tuple[Entry, ...]:
        stages = range(rank, ranks * chunks, ranks)
        forwards = in_groups(Kind.F, stages, microbatches, group=size, slices=slices)
        backwards = in_groups(Kind.B, reversed(stages), microbatches, group=size, slices=slices)
        warmup = 2 * (ranks - rank - 1) + lead(forwards, backwards) + extra_warmup
        return existing(in_turn(warmup, forwards, backwards), microbatches)

    rows = tuple(row(rank) for rank in range(ranks))
    return Schedule("interleaved-1f1b", Placement.looped(ranks, chunks), microbatches, rows, slices)
