"""Interleaved 1F1B: several stages a rank, so that the pipeline fills in smaller steps."""

from __future__ import annotations

from pipeflow.core.action import Action, Kind
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule


def interleaved_one_f_one_b(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """1F1B over several stages a rank, so that the pipeline fills in smaller steps.

    Microbatches go through a rank's chunks in groups of R: the group through chunk 0, then the group through
    chunk 1, and so on; backwards likewise from the last chunk. When M is no multiple of R the last group is
    filled up and what does not exist is dropped.

    Source: Megatron-LM, arXiv 2104.04473, section 2.2.2. With R ranks, v chunks and M a multiple of R: bubble
    (R-1)(F+B)/v, peak min(2(R-r-1) + (v-1)R + 1, Mv) chunk activations on rank r. In the picture lower case is chunk 1.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(interleaved_one_f_one_b(4, 4, chunks=2))))
    rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  .  .  .  b0--- .  b1--- .  b2--- .  b3--- B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0--- .  b1--- .  b2--- .  b3--- B0--- B1--- B2--- B3--- .  .
    rank 2  .  .  F0 F1 F2 F3 f0 f1 f2 .  b0--- f3 b1--- .  b2--- .  b3--- B0--- B1--- B2--- B3--- .  .  .  .
    rank 3  .  .  .  F0 F1 F2 F3 f0 b0--- f1 b1--- f2 b2--- f3 b3--- B0--- B1--- B2--- B3--- .  .  .  .  .  .
    """
    require_positive(chunks=chunks)
    padded = -(-microbatches // ranks) * ranks

    def turns(backward: bool) -> list[tuple[int, int]]:
        """(chunk, microbatch) in the order in which every rank runs them."""
        order = range(chunks - 1, -1, -1) if backward else range(chunks)
        groups = range(0, padded, ranks)
        return [(chunk, first + offset) for first in groups for chunk in order for offset in range(ranks)]

    def row(rank: int) -> tuple[Action, ...]:
        forwards = [Action(Kind.F, chunk * ranks + rank, microbatch) for chunk, microbatch in turns(backward=False)]
        backwards = [Action(Kind.B, chunk * ranks + rank, microbatch) for chunk, microbatch in turns(backward=True)]
        warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(forwards))
        steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
        cooldown = backwards[len(backwards) - warmup :]
        return tuple(action for action in (*forwards[:warmup], *steady, *cooldown) if action.microbatch < microbatches)

    rows = tuple(row(rank) for rank in range(ranks))
    return Schedule("interleaved-1f1b", Placement.looped(ranks, chunks), microbatches, rows)
