"""GPipe: all forwards, then all backwards; and the naive pipeline: one microbatch, and so one rank, at a time."""

from __future__ import annotations

from pipeflow.core.action import Action, Kind
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in microbatch order.

    Source: GPipe, arXiv 1811.06965. F is the time of a forward, and B the time of a full backward. With R ranks and M
    microbatches, the bubble is (R-1)(F+B), and the peak is M activations on every rank.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(gpipe(4, 4))))
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3--- .  .
    rank 2  .  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .  .  .
    rank 3  .  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .  .  .
    """

    def row(rank: int) -> tuple[Action, ...]:
        forwards = tuple(Action(Kind.F, rank, microbatch) for microbatch in range(microbatches))
        backwards = tuple(Action(Kind.B, rank, microbatch) for microbatch in range(microbatches))
        return forwards + backwards

    return Schedule("gpipe", Placement.linear(ranks), microbatches, tuple(row(rank) for rank in range(ranks)))


def naive(ranks: int, microbatches: int) -> Schedule:
    """One microbatch at a time, so one rank computes and all others wait.

    This is how a model that is spread over devices runs without a schedule; it is a baseline for the others. F is the
    time of a forward, and B the time of a full backward. With R ranks and M microbatches, the bubble is (R-1) M (F+B),
    so each rank is busy for 1/R of the time. The peak is 1 activation on every rank.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(naive(4, 2))))
    rank 0  F0 .  .  .  .  .  .  .  .  .  B0--- F1 .  .  .  .  .  .  .  .  .  B1---
    rank 1  .  F0 .  .  .  .  .  .  B0--- .  .  .  F1 .  .  .  .  .  .  B1--- .  .
    rank 2  .  .  F0 .  .  .  B0--- .  .  .  .  .  .  F1 .  .  .  B1--- .  .  .  .
    rank 3  .  .  .  F0 B0--- .  .  .  .  .  .  .  .  .  F1 B1--- .  .  .  .  .  .
    """

    def row(rank: int) -> tuple[Action, ...]:
        return tuple(Action(kind, rank, each) for each in range(microbatches) for kind in (Kind.F, Kind.B))

    return Schedule("naive", Placement.linear(ranks), microbatches, tuple(row(rank) for rank in range(ranks)))
