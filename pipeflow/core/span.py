"""Span: one action in time; and Cause: what it began after. What must not live here: measures of a whole timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.action import Action
from pipeflow.core.dataflow import Value, makes, needs


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
    return tuple(tuple(_cause(*each) for each in row) for row in _candidates(rows, num_stages))


def waits(rows: tuple[Row, ...], num_stages: int) -> list[float]:
    """Where a rank stood idle for a value from another rank: the time from when that was made to when the
    action that needed it began. What a transfer takes, as seen from the timeline.
    """
    return [
        span.start - sent[0].end
        for row in _candidates(rows, num_stages)
        for span, previous, sent in row
        if sent is not None and sent[0].end > (0.0 if previous is None else previous.end)
    ]


Sent = tuple[Span, Value]


def _candidates(rows: tuple[Row, ...], num_stages: int) -> Iterator[Iterator[tuple[Span, Span | None, Sent | None]]]:
    """Each span, the one before it on its rank, and the latest maker of its input on another rank."""
    makers: dict[Value, Span] = {}
    for row in rows:
        for span, following in zip(row, (*row[1:], *row[-1:]), strict=True):
            seen = following if following.action == span.partner else span  # others see a pair when both are done
            makers.update(dict.fromkeys(makes(span.action, num_stages), seen))

    def sent(span: Span) -> Sent | None:
        wanted = needs(span.action, num_stages)
        if span.partner is not None:  # a pair begins when both have what they need
            wanted += needs(span.partner, num_stages)
        arriving = [(makers[value], value) for value in wanted if value in makers and makers[value].rank != span.rank]
        return max(arriving, key=lambda one: one[0].end, default=None)

    for row in rows:
        yield ((span, previous, sent(span)) for previous, span in zip((None, *row), row, strict=False))


def _cause(span: Span, previous: Span | None, sent: Sent | None) -> Cause:
    if sent is None or (previous is not None and previous.partner == span.action):
        return Cause(span, previous, None)
    maker, value = sent
    if previous is not None and maker.end <= previous.end:
        waited = span.start - previous.end > (span.end - span.start) / 20
        return Cause(span, maker, value) if waited else Cause(span, previous, None)
    return Cause(span, maker, value)
