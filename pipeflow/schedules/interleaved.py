"""Interleaved 1F1B: several stages a rank, so that the pipeline fills in smaller steps."""

from __future__ import annotations

from pipeflow.core.action import Action, Kind
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule


def interleaved_one_f_one_b(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` stages a rank. Microbatches go through a rank's chunks in groups of R: the group
    through chunk 0, then the group through chunk 1, and so on; backwards likewise from the last chunk.

    When M is no multiple of R the last group is filled up and what does not exist is dropped.

    Source: Megatron-LM, arXiv 2104.04473, section 2.2.2. With R ranks, v chunks and M a multiple of R: bubble
    (R-1)(F+B)/v, peak min(2(R-r-1) + (v-1)R + 1, Mv) chunk activations on rank r.
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
