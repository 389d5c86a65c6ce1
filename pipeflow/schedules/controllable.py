"""Controllable memory: a building block, repeated per microbatch, whose offsets set how many activations are kept."""

from __future__ import annotations

from collections.abc import Callable

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import Place, sources
from pipeflow.core.liveness import ACTIVATIONS
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule

PASSES = 6  # passes of one microbatch on a rank: F, I and W of two chunks
WINDOW = 6  # how many passes of its block a rank looks ahead

Block = Callable[[int], tuple[int, int, int, int]]
"""From a rank to the passes in which one microbatch runs F on the way down, F up, I up and I down."""


def v_half(ranks: int, microbatches: int) -> Schedule:
    """V-shaped: half the activations of 1F1B, with some bubble.

    A forward advances one rank every 2 passes on the way down and every pass on the way up. Backwards do the same.

    Source: arXiv 2405.15362; `_repeated` makes the schedule from the block. With R > 1 ranks, M >= 2R microbatches and
    F = I = W, the peak is R+2 chunk activations on every rank (1F1B: 2R on rank 0). Weight-gradient halves that wait
    keep one more. For R >= 6, the bubble is 3(R-3) passes (published: 3R-7; 1F1B: 6(R-1)). In the picture, lower case
    is the way up.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(v_half(4, 4))))
    rank 0  F0 F1 F2 F3 .  .  .  f0 i0 f1 i1 w0 w1 f2 i2 I0 w2 f3 i3 I1 W0 I2 w3 W1 W2 I3 W3 .  .
    rank 1  .  F0 F1 F2 F3 .  f0 .  f1 i0 w0 i1 f2 w1 I0 i2 f3 W0 I1 i3 I2 w2 W1 w3 I3 W2 W3 .  .
    rank 2  .  .  F0 F1 F2 f0 F3 f1 .  .  i0 f2 i1 I0 w0 f3 i2 I1 w1 I2 i3 W0 w2 I3 W1 W2 w3 W3 .
    rank 3  .  .  .  F0 f0 F1 f1 F2 f2 .  .  i0 I0 F3 f3 i1 I1 i2 I2 w0 W0 i3 I3 w1 W1 w2 W2 w3 W3
    """
    gap = 3 if ranks % 2 == 0 else 0  # otherwise two actions would fall into one pass

    def block(rank: int) -> tuple[int, int, int, int]:
        back = 3 * ranks + gap + 2 * rank - 1
        return 2 * rank, 3 * ranks - rank - 2, back, 6 * ranks + gap - rank - 2

    return _repeated("v-half", ranks, microbatches, block, peak=ranks + 2)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """V-shaped: a third of the activations of 1F1B, with more bubble.

    Forwards and backwards advance one rank every pass.

    Source: arXiv 2405.15362; `_repeated` makes the schedule from the block. With R ranks, M >= 2R microbatches and F =
    I = W, the peak is 2 floor((R+4)/3) chunk activations on every rank (1F1B: 2R on rank 0). Weight-gradient halves
    that wait keep one more. The bubble is at most 4R-5 passes, and 4R-7 if 3 divides R, as published (1F1B: 6(R-1)). In
    the picture, lower case is the way up.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(v_min(4, 4))))
    rank 0  F0 F1 F2 .  .  .  .  f0 i0 w0 .  .  .  f1 i1 I0 F3 f2 i2 w1 W0 I1 w2 f3 i3 I2 W1 w3 W2 .  .  I3 W3
    rank 1  .  F0 F1 F2 .  .  f0 .  .  i0 w0 .  f1 .  I0 i1 f2 F3 W0 i2 I1 w1 f3 w2 I2 i3 W1 W2 w3 .  I3 W3 .
    rank 2  .  .  F0 F1 F2 f0 .  .  .  .  i0 f1 w0 I0 W0 f2 i1 w1 F3 I1 i2 f3 W1 I2 w2 W2 i3 w3 .  I3 W3 .  .
    rank 3  .  .  .  F0 f0 F1 f1 .  .  .  .  i0 I0 F2 f2 w0 W0 i1 I1 F3 f3 i2 I2 w1 W1 w2 W2 i3 I3 w3 W3 .  .
    """
    gap = 2 if ranks % 3 == 0 else 0  # otherwise two actions would fall into one pass

    def block(rank: int) -> tuple[int, int, int, int]:
        return rank, 2 * ranks - 1 - rank, 2 * ranks + gap + rank, 4 * ranks + gap - 1 - rank

    return _repeated("v-min", ranks, microbatches, block, peak=2 * ((ranks + 4) // 3))


def _repeated(name: str, ranks: int, microbatches: int, block: Block, *, peak: int) -> Schedule:
    """The `block` once per microbatch, PASSES apart, which fixes the order of F and I on each rank. It then runs pass
    by pass:

    - If an action cannot start yet, the next one that can start runs first. A forward runs first only if no more than
      `peak` activations are then kept.
    - A weight-gradient half fills a free pass. It goes before a forward if the waiting halves (half an activation each)
      exceed `peak` by more than one activation.
    """
    workers = [_Rank(rank, 2 * ranks, microbatches, block(rank), peak) for rank in range(ranks)]
    done: set[Action] = set()
    while any(worker.waiting or worker.weights for worker in workers):
        done.update([action for worker in workers if (action := worker.turn(done))])
    return Schedule(name, Placement.vee(ranks), microbatches, tuple(tuple(worker.row) for worker in workers))


class _Rank:
    """The state of a rank while its row is made."""

    def __init__(self, rank: int, stages: int, microbatches: int, block: tuple[int, int, int, int], peak: int) -> None:
        down, up = rank, stages - 1 - rank
        passes = list(zip(block, ((Kind.F, down), (Kind.F, up), (Kind.I, up), (Kind.I, down)), strict=True))
        times = [
            (offset + PASSES * microbatch, Action(kind, stage, microbatch))
            for microbatch in range(microbatches)
            for offset, (kind, stage) in passes
        ]
        order = [action for _, action in sorted(times, key=lambda time: time[0])]
        makers = sources((Kind.F, Kind.I), stages)
        self.waiting = [(action, _at(makers[action.kind, action.stage], action.microbatch)) for action in order]
        self.weights: list[Action] = []
        self.row: list[Action] = []
        self._alive = 0
        self._peak = peak

    def turn(self, done: set[Action]) -> Action | None:
        """The action that the rank runs in this pass; `done` has the actions of the passes before. None: it is idle."""
        index = self._startable(done)
        if index is None or (self.waiting[index][0].kind is Kind.F and self._is_full()):
            return self._ran(self.weights.pop(0)) if self.weights else None
        return self._ran(self.waiting.pop(index)[0])

    def _startable(self, done: set[Action]) -> int | None:
        alive = most = self._alive
        for index, (action, needed) in enumerate(self.waiting[:WINDOW]):
            if (needed is None or needed in done) and (ACTIVATIONS[action.kind] < 0 or most < self._peak):
                return index
            alive += ACTIVATIONS[action.kind]
            most = max(most, alive)
        return None

    def _is_full(self) -> bool:
        return bool(self.weights) and self._alive + len(self.weights) / 2 > self._peak

    def _ran(self, action: Action) -> Action:
        self.row.append(action)
        self._alive += ACTIVATIONS[action.kind]
        if action.kind is Kind.I:
            self.weights.append(Action(Kind.W, action.stage, action.microbatch))
        return action


def _at(place: Place | None, microbatch: int) -> Action | None:
    return None if place is None else Action(*place, microbatch)
