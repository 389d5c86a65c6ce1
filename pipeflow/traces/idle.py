"""Idle times: why each rank stood still. Must not contain: what to do about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipeflow.analysis.idle_time import Cause, causes
from pipeflow.core.dataflow import Stream
from pipeflow.core.span import Span
from pipeflow.core.timeline import Timeline

SHORTEST = 1e-3  # shares of the step: shorter pauses are part of the engine's own work
LATE = 2.0  # times the usual transfer: what takes longer was held up by the host

Link = tuple[int, int]  # from rank, to rank


class Idle(NamedTuple):
    """A time in which a rank did not compute.

    Attributes:
        rank: the rank.
        start, end: seconds from the start of the step.
        kind: "fill" and "drain", before the first action of the rank and after the last one; "waiting" for an action of
            another rank to end; "transfer" of what that made; "host" where all was there, so that the host or the
            engine was late.
        cause: the cause in words.
        source: the rank that made what was waited for; None if there is none.
    """

    rank: int
    start: float
    end: float
    kind: str
    cause: str
    source: int | None = None


def idle_times(timeline: Timeline) -> list[Idle]:
    """Every time in which a rank is idle, rank by rank, each with one cause."""
    least = SHORTEST * timeline.makespan
    rows = [[cause for cause in row if cause.span.stream is Stream.COMPUTE] for row in causes(timeline)]
    usual = _transfer_times(rows)
    found = (each for rank, row in enumerate(rows) for each in _of_rank(timeline, rank, row, usual))
    return [each for each in found if each.end - each.start > least]


def _transfer_times(rows: Sequence[Sequence[Cause]]) -> dict[Link, float]:
    """Per link, the time that a value usually takes: the lower quartile where the receiver stood waiting for it."""
    waits: dict[Link, list[float]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for free, cause in _pauses(row):
            if (maker := _maker(cause)) is not None and maker.end >= free:
                waits[maker.rank, rank].append(cause.span.start - maker.end)
    return {link: sorted(times)[len(times) // 4] for link, times in waits.items()}


def _pauses(row: Sequence[Cause]) -> Iterator[tuple[float, Cause]]:
    """Each action with the time from which its rank was free for it."""
    free = 0.0
    for cause in row:
        yield free, cause
        free = cause.span.end


def _maker(cause: Cause) -> Span | None:
    """What made the value that an action waited for, on another rank."""
    return cause.after if cause.value is not None and cause.after and cause.after.rank != cause.span.rank else None


def _of_rank(timeline: Timeline, rank: int, row: Sequence[Cause], usual: Mapping[Link, float]) -> Iterator[Idle]:
    if not row:
        yield Idle(rank, 0.0, timeline.makespan, "drain", f"rank {rank} has nothing to do")
        return
    for free, cause in _pauses(row):
        yield from _between(rank, free, cause, usual, is_first=cause is row[0])
    last = row[-1].span
    yield Idle(rank, last.end, timeline.makespan, "drain", f"the pipeline drains: {last.action} is the last action")


def _between(rank: int, free: float, cause: Cause, usual: Mapping[Link, float], *, is_first: bool) -> Iterator[Idle]:
    """The parts of a pause before an action: until what it needs was made, until that usually arrives, and from then
    on.
    """
    span, maker = cause.span, _maker(cause)
    made = arrived = free
    if maker is not None:
        made = min(max(maker.end, free), span.start)
        arrived = max(made, maker.end + LATE * usual.get((maker.rank, rank), 0.0))
        arrived = span.start if span.start <= arrived else min(arrived, span.start)
        if is_first:
            yield Idle(rank, free, made, "fill", f"the pipeline fills: {span.action} is the first action")
        else:
            yield Idle(
                rank, free, made, "waiting", f"{span.action} waited for {maker.action} on rank {maker.rank}", maker.rank
            )
        assert cause.value is not None
        came = f"the {cause.value.content} of {maker.action} came from rank {maker.rank}"
        yield Idle(rank, made, arrived, "transfer", came, maker.rank)
    yield Idle(rank, arrived, span.start, "host", f"nothing was missing for {span.action}")
