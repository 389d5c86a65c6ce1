"""Zero bubble with one stage per rank: weight-gradient halves of backwards fill time that would be bubble."""

from __future__ import annotations

from pipeflow.core.action import Action, Kind
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.row_parts import in_turn, parts


def zb_h1(ranks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """1F1B with split backwards: no more activations, a third of the bubble.

    Warm-up: one forward for each rank after this one. Steady state: a forward and an input-gradient half in turn. From
    turn r+1 on, rank r also runs a weight-gradient half in each turn. Cool-down: the remaining halves.

    Source: arXiv 2401.10241, section 2. With R ranks and M >= R microbatches, the bubble is (R-1)(F+I-W) if W <= F and
    W <= I. The peak is R-r activations on rank r, as in 1F1B. Later ranks keep more memory for weight-gradient halves
    that wait.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(zb_h1(4, 4))))
    rank 0  F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
    rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
    rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
    """
    return _zero_bubble("zb-h1", ranks, microbatches, lead=1, slices=slices)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 with twice the warm-up: with equal costs, no bubble except the late start.

    Warm-up: two forwards for each rank after this one, so that a rank is busy until its first gradient arrives. Then as
    in ZB-H1, with weight-gradient halves from turn 2r+1 on.

    Source: arXiv 2401.10241, section 2. With R ranks, M >= 2R-1 microbatches and F = I = W, every rank works without a
    gap, so the span has no bubble. Rank r begins r forwards late, so the bubble of the makespan is (R-1)F. The peak is
    2(R-r)-1 activations on rank r. It is faster than ZB-H1 only if steps do not end in a barrier.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(zb_h2(4, 7))))
    rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .  .  .
    rank 1  .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .  .
    rank 2  .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 .
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6
    """
    return _zero_bubble("zb-h2", ranks, microbatches, lead=2)


def _zero_bubble(name: str, ranks: int, microbatches: int, *, lead: int, slices: int = 1) -> Schedule:
    """The warm-up has `lead` forwards for each rank after this one. Weight-gradient halves are `lead` turns late for
    each rank before it, so that gradients are early.
    """
    require_positive(slices=slices)

    def row(rank: int) -> tuple[Action, ...]:
        forwards, inputs, weights = (parts(kind, rank, microbatches, slices) for kind in (Kind.F, Kind.I, Kind.W))
        return tuple(in_turn(lead * (ranks - rank - 1) + slices - 1, forwards, inputs, weights, lag=lead * rank))

    rows = tuple(row(rank) for rank in range(ranks))
    return Schedule(name, Placement.linear(ranks), microbatches, rows, slices)
