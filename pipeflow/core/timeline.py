"""Timeline: when every action ran, planned or measured. The two are one type, so they share one drawing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import makes, needs
from pipeflow.core.placement import Placement


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from `start` to `end`, in the timeline's unit of time."""

    action: Action
    rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Per rank, its spans in the order in which they ran; time 0 is the start of the step.

    The measures are those of the zero-bubble paper (arXiv 2401.10241, section 4): `span` is what its
    bubble rates are made of, `makespan` what a step with a barrier at its end costs.
    """

    name: str
    placement: Placement
    rows: tuple[tuple[Span, ...], ...]

    def __iter__(self) -> Iterator[Span]:
        for row in self.rows:
            yield from row

    @property
    def makespan(self) -> float:
        """Last end minus time 0."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def span(self) -> float:
        """The largest, over ranks, of last end minus the rank's own first start."""
        return max((row[-1].end - row[0].start for row in self.rows if row), default=0.0)

    @property
    def work(self) -> float:
        """The largest busy time of a rank."""
        return max((sum(span.end - span.start for span in row) for row in self.rows), default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """1 - work / span: the part of the span in which the busiest rank is idle."""
        return 1 - self.work / self.span if self.span else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank, the most activations alive at once, in microbatches of the rank's whole share of the
        model. An activation lives from its F to the end of its B or I; without backwards nobody keeps it, and
        there is the one being made.
        """
        share = self.placement.chunks_per_rank
        return tuple(_peak(row) / share for row in self.rows)

    def waits(self) -> list[float]:
        """Where a rank stood idle for a value from another rank: the time from when that was made to when the
        action that needed it began. What a transfer takes, as seen from the timeline.
        """
        return [
            span.start - sender.end
            for span, previous, sender in self._causes()
            if sender is not None and sender.end > (0.0 if previous is None else previous.end)
        ]

    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that the makespan consists of: each began when the one before it, on its own
        rank or where its input was made, let it.
        """
        causes = {span: _cause(span, previous, sender) for span, previous, sender in self._causes()}
        last = max((row[-1] for row in self.rows if row), key=lambda span: span.end, default=None)
        path: list[Span] = []
        while last is not None:
            path.append(last)
            last = causes[last]
        return tuple(reversed(path))

    def _causes(self) -> Iterator[tuple[Span, Span | None, Span | None]]:
        """Each span, the one before it on its rank, and the latest maker of its input on another rank."""
        stages = self.placement.num_stages
        makers = {value: span for span in self for value in makes(span.action, stages)}
        for row in self.rows:
            for previous, span in zip((None, *row), row, strict=False):
                inputs = [makers[value] for value in needs(span.action, stages) if value in makers]
                sent = [maker for maker in inputs if maker.rank != span.rank]
                yield span, previous, max(sent, key=lambda maker: maker.end, default=None)


def _cause(span: Span, previous: Span | None, sender: Span | None) -> Span | None:
    """What `span` began after: the one before it on its rank, or the maker of its input on another rank.

    A transfer takes an unknown time. So the input is what was waited for when the rank was idle for longer than
    a measured rank is between any two spans: a twentieth of the span.
    """
    if previous is None or sender is None:
        return previous or sender
    waited = span.start - previous.end > (span.end - span.start) / 20
    return sender if waited or sender.end > previous.end else previous


def _peak(row: tuple[Span, ...]) -> int:
    if all(span.action.kind is Kind.F for span in row):
        return min(len(row), 1)
    alive = peak = 0
    for span in row:
        match span.action.kind:
            case Kind.F:
                alive += 1
                peak = max(peak, alive)
            case Kind.B | Kind.I:
                alive -= 1
            case Kind.W:
                pass
    return peak
