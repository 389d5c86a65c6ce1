"""DualPipe: microbatches enter at both ends of the pipeline, and forwards of one direction overlap with backwards of
the other. In DualPipeV the two directions are the two ways of a V: down and up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pipeflow.core.action import Action, Entry, Kind, Pair
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.row_parts import existing, require_even


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Microbatches in both directions, forwards overlapped with backwards.

    A rank holds one stage of each direction. Even microbatches enter at rank 0, odd ones at the last rank. Warm-up:
    forwards of the direction that begins nearer, then of both in turn. When the first gradients of the other direction
    arrive, its backwards run in halves. Steady state: a forward of one direction with a backward of the other, as a
    `Pair` that overlaps them, and the other way round. Cool-down: the remaining backwards, the last ones in halves, so
    that weight-gradient halves fill idle time. With fewer than 2R microbatches, or an odd number, the order is the same
    without the missing ones.

    Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1. The number of ranks R must be even, otherwise UsageError. With
    M >= 2R even, the published bubble is (R/2-1)(F&B + B - 3W), where B is a whole backward and F&B a pair. With F = I
    = W, and pairs that save no time, this is (R-2)F, and half of it if pairs are taken apart. The peak is R+1
    activations on every rank. There are two copies of the weights. In the picture, lower case is the later stage. A
    forward directly before a whole backward is a pair with it, except the first one on the middle ranks.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(dualpipe(4, 8))))
    rank 0  F0 F2 F4 f1 i1 w1 f3 F6 b3--- .  f5 B0--- b5--- .  f7 B2--- b7--- I4 W4 I6 W6
    rank 1  .  F0 f1 F2 f3 F4 b1--- f5 B0--- F6 b3--- f7 B2--- b5--- B4--- .  i7 I6 w7 W6
    rank 2  .  F1 f0 F3 f2 F5 b0--- f4 B1--- F7 b2--- f6 B3--- b4--- B5--- .  i6 I7 w6 W7
    rank 3  F1 F3 F5 f0 i0 w0 f2 F7 b2--- .  f4 B1--- b4--- .  f6 B3--- b6--- I5 W5 I7 W7
    """
    require_even("dualpipe", ranks)
    depth = ranks // 2

    def row(rank: int) -> tuple[Entry, ...]:
        near, far = (0, 1) if rank < depth else (1, 0)  # the path that begins nearer to this rank
        place = min(rank, ranks - 1 - rank)
        streams = _Stream(place, near, 2), _Stream(ranks - 1 - place, far, 2)
        return existing(_row(*streams, depth, place, -(-microbatches // 2)), microbatches)

    return Schedule("dualpipe", Placement.bidirectional(ranks), microbatches, tuple(row(rank) for rank in range(ranks)))


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe folded into a V, with one copy of the weights.

    It is DualPipe on twice the ranks, with the second half folded onto the first. Rank r holds stages r (the way down)
    and 2R-1-r (the way up), which are the two directions. With fewer than 2R microbatches, the order is the same
    without the missing ones.

    Source: the "cut-in-half" of DualPipe (Sea AI Lab), in its repository as DualPipeV. Times are those of
    a chunk: B is a whole backward and F&B a pair. With R ranks and M >= 2R, the published bubble is (R-1)(F&B + B -
    3W). With F = I = W, and pairs that save no time, this is 2(R-1)F, and half of it if pairs are taken apart. The peak
    is 2R+1 chunk activations on every rank. There is one copy of the weights. In the picture, lower case is the way up.

    >>> from pipeflow import simulate
    >>> from pipeflow.draw import picture
    >>> print(picture(simulate(dualpipe_v(4, 8))))
    rank 0  F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 F7 b3--- .  .  .  f4 B0--- b4--- .  f5 B1--- b5--- .  f6 B2--- b6--- .  f7 B3--- b7--- I4 W4 I5 W5 I6 W6 I7 W7
    rank 1  .  F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 F6 b2--- .  .  f4 B0--- F7 b3--- f5 B1--- b4--- .  f6 B2--- b5--- .  f7 B3--- b6--- B4--- .  i7 I5 w7 I6 W5 I7 W6 W7
    rank 2  .  .  F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 F5 b1--- .  f4 B0--- F6 b2--- f5 B1--- F7 b3--- f6 B2--- b4--- .  f7 B3--- b5--- B4--- .  b6--- I5 .  i7 I6 W5 I7 w7 W6 W7
    rank 3  .  .  .  F0 f0 F1 f1 F2 f2 F3 f3 F4 b0--- f4 B0--- F5 b1--- f5 B1--- F6 b2--- f6 B2--- F7 b3--- f7 B3--- b4--- B4--- .  b5--- B5--- .  i6 I6 .  i7 I7 w6 W6 w7 W7
    """  # noqa: E501  # the picture is that wide

    def row(rank: int) -> tuple[Entry, ...]:
        streams = _Stream(rank, 0, 1), _Stream(2 * ranks - 1 - rank, 0, 1)
        return existing(_row(*streams, ranks, rank, microbatches), microbatches)

    return Schedule("dualpipe-v", Placement.vee(ranks), microbatches, tuple(row(rank) for rank in range(ranks)))


class _Stream:
    """The forwards and backwards of one direction on one stage: microbatch `first`, then every `step`-th one."""

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
    """The row of the rank at `place` of `depth`, with `microbatches` in each of its two streams. Stream `near` begins
    at place 0 and `far` ends there; both are half way through at place `depth` - 1.
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
        if turn == 0 and behind == 0:  # no pair, since other ranks wait for this first gradient
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
