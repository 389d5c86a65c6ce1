"""Interleaved zero bubble: several stages per rank and backwards in halves, which also shortens the warm-up."""

from __future__ import annotations

from pipeflow.core.action import Entry, Kind
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.row_parts import existing, in_groups, in_turn


def interleaved_zb(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B with split backwards: fewer activations, a third of the bubble.

    Microbatches go through a rank's chunks in groups of R, as in interleaved 1F1B. Warm-up: one forward for each rank
    after this one, and the first group through every chunk but the last. Steady state: a forward and an input-gradient
    half in turn. From turn r+1 on, rank r also runs a weight-gradient half in each turn. Cool-down: the remaining
    halves.

    Source: zero bubble, arXiv 2401.10241, on the chunks of Megatron-LM, arXiv 2104.04473. With R ranks, v chunks and M
    a multiple of R, the bubble is (R-1)(F+I-W)/v if W <= F and W <= I. The peak is Rv chunk activations on rank 0, and
    one fewer on each rank after it. In the picture, lower case is chunk 1.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(interleaved_zb(4, 4, chunks=2))))
    rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  i0 w0 i1 w1 i2 w2 i3 w3 I0 W0 I1 W1 I2 W2 I3 W3
    rank 1  .  F0 F1 F2 F3 f0 f1 f2 .  .  i0 f3 i1 w0 i2 w1 i3 w2 I0 w3 I1 W0 I2 W1 I3 W2 W3
    rank 2  .  .  F0 F1 F2 F3 f0 f1 .  i0 f2 i1 f3 i2 w0 i3 w1 I0 w2 I1 w3 I2 W0 I3 W1 W2 W3
    rank 3  .  .  .  F0 F1 F2 F3 f0 i0 f1 i1 f2 i2 f3 i3 w0 I0 w1 I1 w2 I2 w3 I3 W0 W1 W2 W3
    """
    require_positive(chunks=chunks)
    rows = [grouped_row(ranks, microbatches, chunks, rank, group=ranks, lag=rank) for rank in range(ranks)]
    return Schedule("interleaved-zb", Placement.looped(ranks, chunks), microbatches, tuple(rows))


def grouped_row(ranks: int, microbatches: int, chunks: int, rank: int, *, group: int, lag: int) -> tuple[Entry, ...]:
    """The row of a rank that takes microbatches through its chunks in groups of `group`, with weight-gradient halves
    `lag` turns after input-gradient halves. The last group is padded, and microbatches that do not exist are left out.
    """
    stages = range(rank, ranks * chunks, ranks)
    forwards = in_groups(Kind.F, stages, microbatches, group=group)
    inputs, weights = (in_groups(kind, reversed(stages), microbatches, group=group) for kind in (Kind.I, Kind.W))
    warmup = (chunks - 1) * group + ranks - rank - 1
    return existing(in_turn(warmup, forwards, inputs, weights, lag=lag), microbatches)
