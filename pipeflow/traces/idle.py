"""Idle times: why each rank stood still. Must not contain: what to do about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from pipeflow.analysis.idle_time import Cause, causes
from pipeflow.core.dataflow import Stream
from pipeflow.core.span import Span
from pipeflow.core.timeline import Timeline
from pipeflow.traces.usual import Usual, lower_quartile

SHORTEST = 1e-3  # shares of the step: shorter pauses are part of the engine's own work
LATE = 2.0  # times the usual transfer: what takes longer was held up by the host
KINDS = ("fill", "waiting", "slow stage", "straggler", "transfer", "host", "drain")

Link = tuple[int, int]  # from rank, to rank


class Idle(NamedTuple):
    """A time in which a rank did not compute.

    Attributes:
        rank: the rank.
        start, end: seconds from the start of the step.
        kind: "fill" and "drain", before the first action of the rank and after the last one; "waiting" for an action of
            another rank to end, of which "slow stage" and "straggler" are the parts that a slow stage or a late action
            add; "transfer" of what that made; "host" where all was there, so that the host or the engine was late.
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
    waits = _Waits(timeline)
    found = (each for rank in range(len(timeline.rows)) for each in waits.of_rank(rank))
    return [each for each in found if each.end - each.start > least]


def critical_path(timeline: Timeline) -> list[Span]:
    """The chain of computations that the length of a step consists of, earliest first: before each of them its value
    was made or, if that had arrived before the rank was free, what the rank did.
    """
    last = max((row[-1] for row in timeline.on(Stream.COMPUTE) if row), key=lambda span: span.end, default=None)
    return [] if last is None else [*_Waits(timeline).chain(last)][::-1]


def _pauses(row: Sequence[Cause]) -> Iterator[tuple[float, Cause]]:
    """Each action with the time from which its rank was free for it."""
    free = 0.0
    for cause in row:
        yield free, cause
        free = cause.span.end


def _maker(cause: Cause) -> Span | None:
    """The span on another rank that made the value that an action waited for; None if there is none."""
    return cause.after if cause.value is not None and cause.after and cause.after.rank != cause.span.rank else None


def _transfer_times(rows: Sequence[Sequence[Cause]]) -> Mapping[Link, float]:
    """Per link, the time that a value usually takes: the lower quartile where the receiver stood waiting for it."""
    waits: dict[Link, list[float]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for free, cause in _pauses(row):
            if (maker := _maker(cause)) is not None and maker.end >= free:
                waits[maker.rank, rank].append(cause.span.start - maker.end)
    return {link: lower_quartile(times) for link, times in waits.items()}


class _Waits:
    """Divides the pauses of ranks by cause."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._usual = timeline, Usual(timeline)
        self._rows = [[cause for cause in row if cause.span.stream is Stream.COMPUTE] for row in causes(timeline)]
        self._transfers = _transfer_times(self._rows)
        self._before: dict[int, Span | None] = {}
        for row in self._rows:
            for previous, cause in zip((None, *row), row, strict=False):
                self._before[id(cause.span)] = self._awaited(None if previous is None else previous.span, cause)

    def of_rank(self, rank: int) -> Iterator[Idle]:
        row, makespan = self._rows[rank], self._timeline.makespan
        if not row:
            yield Idle(rank, 0.0, makespan, "drain", f"rank {rank} has nothing to do")
            return
        for free, cause in _pauses(row):
            yield from self._between(free, cause, is_first=cause is row[0])
        last = row[-1].span
        yield Idle(rank, last.end, makespan, "drain", f"the pipeline drains: {last.action} is the last action")

    def _between(self, free: float, cause: Cause, *, is_first: bool) -> Iterator[Idle]:
        """The parts of a pause before an action: until what it needs was made, until that usually arrives, and from
        then on.
        """
        span, maker, rank = cause.span, _maker(cause), cause.span.rank
        arrived = free
        if maker is not None:
            made = min(max(maker.end, free), span.start)
            arrived = min(max(made, self._arrival(maker, rank)), span.start)
            if is_first:
                yield Idle(rank, free, made, "fill", f"the pipeline fills: {span.action} is the first action")
            else:
                yield from self._waiting(free, made, span, maker)
            assert cause.value is not None
            came = f"the {cause.value.content} of {maker.action} came from rank {maker.rank}"
            yield Idle(rank, made, arrived, "transfer", came, maker.rank)
        yield Idle(rank, arrived, span.start, "host", f"nothing was missing for {span.action}")

    def _waiting(self, free: float, made: float, span: Span, maker: Span) -> Iterator[Idle]:
        """The parts of a wait: first what any stage would take, then what slow stages and late actions add."""
        words = f"{span.action} waited for {maker.action} on rank {maker.rank}"
        added = {"slow stage": (0.0, maker), "straggler": (0.0, maker)}
        for each in takewhile(lambda each: each.end > free, self.chain(maker)):
            kind, extra = self._extra(each)
            if extra:
                seconds = each.end - max(each.start, free)
                total, worst = added[kind]
                added[kind] = total + min(extra, seconds), worst if total else each
        left = made - free
        parts = [(kind, min(total, left), worst) for kind, (total, worst) in added.items()]
        start = made - min(left, sum(seconds for _, seconds, _ in parts))
        yield Idle(span.rank, free, start, "waiting", words, maker.rank)
        for kind, seconds, worst in parts:
            end = min(start + seconds, made)
            what = f"stage {worst.action.stage} is slow" if kind == "slow stage" else f"{worst.action} was late"
            yield Idle(span.rank, start, end, kind, f"{words}, and {what} on rank {worst.rank}", maker.rank)
            start = end

    def chain(self, span: Span | None) -> Iterator[Span]:
        """A span, what it waited for, and so on back to the start."""
        while span is not None:
            yield span
            before = self._before.get(id(span))
            span = before if before is not None and before.end < span.end else None

    def _awaited(self, previous: Span | None, cause: Cause) -> Span | None:
        """The span that an action waited for: what made its value, unless that had arrived when the rank was free."""
        maker = _maker(cause)
        if maker is None or previous is None:
            return maker or previous
        return maker if self._arrival(maker, cause.span.rank) > previous.end else previous

    def _arrival(self, maker: Span, rank: int) -> float:
        """When a value has usually arrived at the latest."""
        return maker.end + LATE * self._transfers.get((maker.rank, rank), 0.0)

    def _extra(self, span: Span) -> tuple[str, float]:
        """The reason why a span took longer than usual, and by how much."""
        if late := self._usual.late(span):
            return "straggler", late
        slow = self._usual.slow_stages.get(span.action.stage)
        return "slow stage", 0.0 if slow is None else (span.end - span.start) * (1 - 1 / slow.ratio)
