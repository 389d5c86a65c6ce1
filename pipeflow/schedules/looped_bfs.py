"""Looped breadth-first: every microbatch through a chunk before the next chunk begins."""

from __future__ import annotations

from pipeflow.core.action import Action, Kind
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.row_parts import in_groups


def looped_bfs(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """GPipe over several stages per rank, chunk after chunk.

    A rank runs all forwards of chunk 0, then of chunk 1, and so on. Then it runs the backwards, from the last chunk to
    the first. Each chunk takes the microbatches in order. With sharded weights, each chunk is gathered once for all
    microbatches.

    Source: Breadth-First Pipeline Parallelism, arXiv 2211.05953. With R ranks, v chunks and M >= R microbatches, the
    bubble is (R-1)(F+B)/v, and the peak is Mv chunk activations on every rank.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(looped_bfs(4, 4))))
    rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  .  .  .  .  .  .  b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  .  .  .  b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3--- .  .
    rank 2  .  .  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3--- .  .  .  .
    rank 3  .  .  .  F0 F1 F2 F3 f0 f1 f2 f3 b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3--- .  .  .  .  .  .
    """
    require_positive(chunks=chunks)

    def row(rank: int) -> tuple[Action, ...]:
        stages = range(rank, ranks * chunks, ranks)
        forwards = in_groups(Kind.F, stages, microbatches, group=microbatches)
        backwards = in_groups(Kind.B, reversed(stages), microbatches, group=microbatches)
        return (*forwards, *backwards)

    rows = tuple(row(rank) for rank in range(ranks))
    return Schedule("looped-bfs", Placement.looped(ranks, chunks), microbatches, rows)
