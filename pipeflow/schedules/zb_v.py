"""ZB-V: zero bubble in the memory of 1F1B, on a V of two stages per rank."""

from __future__ import annotations

from itertools import count

from pipeflow.core.action import Action, Entry, Kind
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.row_parts import existing, part_of


def zb_v(ranks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Zero bubble on a V of two stages per rank, in the memory of 1F1B.

    Rank r holds stages r (the way down) and 2R-1-r (the way up). Warm-up: forwards down until the first one comes back
    up, then both in turn, then forwards up with their whole backwards. Steady state: down forward, down backward, up
    forward, up backward. Cool-down: input-gradient halves first, weight-gradient halves in idle time. With fewer than
    2R-1 microbatches, the order is the same without the missing ones. `slices` cuts each microbatch, as in seq1f1b.

    Source: arXiv 2401.10241. With R ranks, M >= 2R-1 microbatches and F = I = W, every rank works without a gap, so the
    span has no bubble. Rank r begins r chunks late, so the bubble of the makespan is (R-1)F/2. The peak is 2R chunk
    activations on every rank, which are R microbatches. In the picture, lower case is the way up.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(zb_v(4, 4))))
    rank 0  F0 F1 F2 F3 .  .  .  f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 I0 W0 .  I1 W1 .  I2 W2 .  I3 W3
    rank 1  .  F0 F1 F2 F3 .  f0 .  f1 i0 w0 f2 i1 w1 f3 i2 w2 I0 W0 i3 w3 I1 W1 .  I2 W2 .  I3 W3 .
    rank 2  .  .  F0 F1 F2 f0 F3 f1 .  f2 i0 w0 f3 i1 w1 I0 W0 i2 w2 I1 W1 i3 w3 I2 W2 .  I3 W3 .  .
    rank 3  .  .  .  F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 I0 W0 i1 w1 I1 W1 i2 w2 I2 W2 i3 w3 I3 W3 .  .  .
    """
    require_positive(slices=slices)
    padded = max(microbatches * slices, 2 * ranks - 1 + slices - 1)

    def row(rank: int) -> tuple[Entry, ...]:
        stages = {"down": rank, "up": 2 * ranks - 1 - rank}
        following = {(kind, way): count() for kind in Kind for way in stages}
        order: list[Action] = []

        def run(way: str, *kinds: Kind) -> None:
            order.extend(part_of(kind, stages[way], next(following[kind, way]), slices) for kind in kinds)

        for _ in range(2 * (ranks - rank) - 1):  # warm-up
            run("down", Kind.F)
        for _ in range(rank + slices - 1):
            run("up", Kind.F)
            run("down", Kind.F)
        for _ in range(ranks - rank):
            run("up", Kind.F, Kind.I, Kind.W)
        down, up = 2 * ranks - rank + slices - 2, ranks + slices - 1  # forwards so far
        while up < padded:  # steady state
            if down < padded:
                run("down", Kind.F)
                down += 1
            run("down", Kind.I, Kind.W)
            run("up", Kind.F, Kind.I, Kind.W)
            up += 1
        for _ in range(slices - 1):  # cool-down
            run("down", Kind.I, Kind.W)
            run("up", Kind.I, Kind.W)
        for _ in range(rank):
            run("down", Kind.I)
            run("up", Kind.I)
        for _ in range(ranks - rank):
            run("down", Kind.I, Kind.W)
        for way in ("up", "down"):
            for _ in range(rank):
                run(way, Kind.W)
        return existing(order, microbatches)

    return Schedule("zb-v", Placement.vee(ranks), microbatches, tuple(row(rank) for rank in range(ranks)), slices)
