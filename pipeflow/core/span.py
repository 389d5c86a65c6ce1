"""Span: one action in time; and Cause: what it began after. What must not live here: measures of a whole timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.action import Action
from pipeflow.core.dataflow import DATAFLOW, Content, Value, flows


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from `start` to `end`, in the timeline's unit of time.

    The two actions of a pair have a span each, one after the other: how they overlap is told by their times, which are
    shorter than alone, and `partner` is the other one.
    """

    action: Action
    rank: int
    start: float
    end: float
    partner: Action | None = None


Row = tuple[Span, ...]


class Cause(NamedTuple):
    """Why `span` did not begin earlier: it began `after` another one, or at once when that is None.

    `value` is what the other one made, on another rank; None when the rank was busy with it until then.
    """

    span: Span
    after: Span | None
    value: Value | None

    def __str__(self) -> str:
        if self.after is None:
            return f"{self.span.action} on rank {self.span.rank} began at once"
        if self.value is None:
            return f"{self.span.action} on rank {self.span.rank} came after {self.after.action}"
        return f"{self.span.action} on rank {self.span.rank} waited for the {self.value} from rank {self.after.rank}"


def causes(rows: tuple[Row, ...], num_stages: int) -> tuple[tuple[Cause, ...], ...]:
    """Per rank and span, what it began after.

    A transfer takes an unknown time. So the input is what was waited for when the rank was idle for longer than
    a measured rank is between any two spans: a twentieth of the span.
    """
    makers = _Makers(rows, num_stages)
    return tuple(
        tuple(_cause(rows, makers, rank, position) for position in range(len(row))) for rank, row in enumerate(rows)
    )


def reduction_causes(
    rows: tuple[Row, ...], reductions: tuple[Row, ...], num_stages: int
) -> tuple[tuple[Cause, ...], ...]:
    """Per rank and reduction, what it began after: the latest of what its rank, and the others that reduce the same
    stage, had to do first.
    """
    if not any(reductions):
        return tuple(() for _ in reductions)
    makers = _Makers(rows, num_stages)
    return tuple(
        tuple(_reduction_cause(rows, reductions, makers, rank, position) for position in range(len(row)))
        for rank, row in enumerate(reductions)
    )


def critical_path(rows: tuple[Row, ...], reductions: tuple[Row, ...], num_stages: int) -> tuple[Cause, ...]:
    """From the span that ends last, cause after cause, back to one that began at once; earliest first."""
    ends = [row[-1] for row in (*rows, *reductions) if row]  # where both end last, it is the computation
    last = max(ends, key=lambda span: span.end, default=None)
    makers = _Makers(rows, num_stages)
    places = {span.action: (rank, position) for rank, row in enumerate(reductions) for position, span in enumerate(row)}
    path: list[Cause] = []
    while last is not None:
        if last.action in places:
            path.append(_reduction_cause(rows, reductions, makers, *places[last.action]))
        else:
            path.append(_cause(rows, makers, *makers.place(last.action)))
        last = path[-1].after
    return tuple(reversed(path))


def waits(rows: tuple[Row, ...], num_stages: int) -> list[float]:
    """Where a rank stood idle for a value from another rank: the time from when that was made to when the
    action that needed it began. What a transfer takes, as seen from the timeline.
    """
    makers = _Makers(rows, num_stages)
    return [
        span.start - sent[0].end
        for row in rows
        for previous, span in zip((None, *row), row, strict=False)
        if (sent := makers.sent(span)) is not None and sent[0].end > (0.0 if previous is None else previous.end)
    ]


Sent = tuple[Span, Value]


class _Makers:
    """Where every action ran, to find what made a value."""

    def __init__(self, rows: tuple[Row, ...], num_stages: int) -> None:
        self._rows = rows
        self._flows = flows(num_stages)
        self._places = {
            (span.action.kind, span.action.stage, span.action.microbatch): (rank, position)
            for rank, row in enumerate(rows)
            for position, span in enumerate(row)
        }

    def place(self, action: Action) -> tuple[int, int]:
        """The rank of an action, and its index there."""
        return self._places[action.kind, action.stage, action.microbatch]

    def weight_gradient(self, action: Action) -> Span | None:
        """What made the weight gradient that a reduction needs."""
        for kind in _MAKERS[Content.WEIGHT_GRADIENT]:
            if place := self._places.get((kind, action.stage, action.microbatch)):
                return self._rows[place[0]][place[1]]
        return None

    def sent(self, span: Span) -> Sent | None:
        """What `span` needs from another rank: the latest of its makers, and what that made. A pair begins when both
        of its halves have what they need, and is seen by others when both are done.
        """
        latest: Sent | None = None
        for action in (span.action,) if span.partner is None else (span.action, span.partner):
            for content, stage in self._flows[action.kind, action.stage].needs:
                for kind in _MAKERS[content]:
                    rank, position = self._places.get((kind, stage, action.microbatch), (span.rank, 0))
                    if rank != span.rank:
                        row = self._rows[rank]
                        maker = row[position]
                        if maker.partner is not None and row[position + 1 : position + 2]:
                            following = row[position + 1]
                            maker = following if following.action == maker.partner else maker
                        if latest is None or maker.end > latest[0].end:
                            latest = maker, Value(content, stage, action.microbatch)
        return latest


_MAKERS = {
    content: [kind for kind, flow in DATAFLOW.items() if content in (made for made, _ in flow.makes)]
    for content in Content
}


def _cause(rows: tuple[Row, ...], makers: _Makers, rank: int, position: int) -> Cause:
    span = rows[rank][position]
    previous = rows[rank][position - 1] if position else None
    sent = makers.sent(span)
    if sent is None or (previous is not None and previous.partner == span.action):
        return Cause(span, previous, None)
    maker, value = sent
    if previous is not None and maker.end <= previous.end:
        waited = span.start - previous.end > (span.end - span.start) / 20
        return Cause(span, maker, value) if waited else Cause(span, previous, None)
    return Cause(span, maker, value)


def _reduction_cause(
    rows: tuple[Row, ...], reductions: tuple[Row, ...], makers: _Makers, rank: int, position: int
) -> Cause:
    """A reduction begins when every rank that takes part is done with what stands before it in its row, and with its
    reductions before; the own rank's part comes first where several end at once.
    """
    span = reductions[rank][position]
    stage = span.action.stage
    others = [(each, index) for each, row in enumerate(reductions) for index in range(len(row)) if each != rank]
    parts = [(rank, position), *(place for place in others if reductions[place[0]][place[1]].action.stage == stage)]
    made = [makers.weight_gradient(reductions[each][index].action) for each, index in parts]
    before = [reductions[each][index - 1] for each, index in parts if index]
    ran = [next((other for other in reversed(rows[each]) if other.end <= span.start), None) for each, _ in parts]
    before = [each for each in before if each.start < span.start]
    ended = [each for each in (*made, *before, *ran) if each and (each.end <= span.start or each is made[0])]
    after = max(ended, key=lambda each: each.end, default=None)
    if after is None or after.rank == rank:
        return Cause(span, after, None)
    microbatch = next(reductions[each][index].action.microbatch for each, index in parts if each == after.rank)
    return Cause(span, after, Value(Content.WEIGHT_GRADIENT, stage, microbatch))
