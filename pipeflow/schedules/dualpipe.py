"""DualPipe: microbatches from both ends of the pipeline, the forwards of one stream overlapped with the backwards
of the other. On a V, both streams are one: the way down and the way up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pipeflow.core.action import Action, Entry, Kind, Pair
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.rows import existing, require_even


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Two streams in opposite directions, forwards overlapped with backwards.

    TODO
    """
    require_even("dualpipe", ranks)
    depth = ranks // 2

    def row(rank: int) -> tuple[Entry, ...]:
        near, far = (0, 1) if rank < depth else (1, 0)  # the path that begins at this end of the pipeline
        place = min(rank, ranks - 1 - rank)
        streams = _Stream(place, near, 2), _Stream(ranks - 1 - place, far, 2)
        return existing(_row(*streams, depth, place, -(-microbatches // 2)), microbatches)

    return Schedule("dualpipe", Placement.bidirectional(ranks), microbatches, tuple(row(rank) for rank in range(ranks)))


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe folded into a V, with one copy of the weights.

    TODO
    """

    def row(rank: int) -> tuple[Entry, ...]:
        streams = _Stream(rank, 0, 1), _Stream(2 * ranks - 1 - rank, 0, 1)
        return existing(_row(*streams, ranks, rank, microbatches), microbatches)

    return Schedule("dualpipe-v", Placement.vee(ranks), microbatches, tuple(row(rank) for rank in range(ranks)))


class _Stream:
    """What passes a rank on one stage: microbatch `first`, then every `step`-th, forwards and backwards."""

    def __init__(self, stage: int, first: int, step: int) -> None:
        self._stage = stage
        self._forwards = count(first, step)
        self._backwards = count(first, step)

    def forward(self) -> Action:
        return Action(Kind.F, self._stage, next(self._forwards))

    def backward(self) -> Action:
        return Action(Kind.B, self._stage, next(self._backwards))

    def halves(self) -> tuple[Action, Action]:
        microbatch = next(self._backwards)
        return Action(Kind.I, self._stage, microbatch), Action(Kind.W, self._stage, microbatch)


def _row(near: _Stream, far: _Stream, depth: int, place: int, microbatches: int) -> Iterator[Entry]:
    """The row of the rank at `place` of `depth`, whose streams have `microbatches` each: `near` begins at place 0,
    `far` ends there, and both pass place `depth` - 1 in the middle of their way.
    """
    padded = max(microbatches, 2 * depth)  # as many as the phases need
    behind = depth - place - 1
    weights: list[Action] = []

    def half(stream: _Stream) -> Action:
        first, second = stream.halves()
        weights.append(second)
        return first

    for _ in range(2 * behind):  # warm-up
        yield near.forward()
    for _ in range(place + 1):
        yield near.forward()
        yield far.forward()
    for _ in range(behind):
        yield half(far)
        yield weights.pop(0)
        yield far.forward()
    for turn in range(padded - 2 * depth + place + 1):  # steady state
        if turn == 0 and behind == 0:  # the one that turned here first: its gradient is needed early
            yield near.forward()
            yield far.backward()
        else:
            yield Pair(near.forward(), far.backward())
        yield Pair(far.forward(), near.backward())
    for _ in range(behind):  # cool-down
        yield far.backward()
        yield Pair(far.forward(), near.backward())
    for turn in range(2 * (place + 1)):
        stream = near if turn % 2 else far
        yield half(stream) if turn > place else stream.backward()
    for _ in range(behind):
        yield weights.pop(0)
        yield half(near)
    yield from weights
