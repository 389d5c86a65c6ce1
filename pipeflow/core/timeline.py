"""Timeline: when every action ran, planned or measured. The two are one type, so they share one drawing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from pipeflow.core.action import Kind
from pipeflow.core.errors import UsageError
from pipeflow.core.notebook import Shown
from pipeflow.core.placement import Placement
from pipeflow.core.span import Cause, Row, Span, causes, critical_path, reduction_causes, waits


@dataclass(frozen=True, slots=True)
class Timeline(Shown):
    """Per rank, its spans in the order in which they ran; time 0 is the start of the step.

    The measures are those of the zero-bubble paper (arXiv 2401.10241, section 4): `span` is what its
    bubble rates are made of, `makespan` what a step with a barrier at its end costs.

    `saved_bytes` and `deferred_bytes` are the cost model's, per stage; empty when it says nothing of memory.

    `reductions` are the spans of gradient reductions, per rank and in their order, which run beside those of `rows`;
    empty when there are none. They count for makespan and span, not for work; iteration leaves them out.
    """

    name: str
    placement: Placement
    rows: tuple[Row, ...]
    saved_bytes: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    reductions: tuple[Row, ...] = ()

    def __iter__(self) -> Iterator[Span]:
        for row in self.rows:
            yield from row

    @property
    def makespan(self) -> float:
        """Last end minus time 0."""
        return max((row[-1].end for row in (*self.rows, *self.reductions) if row), default=0.0)

    def reductions_of(self, rank: int) -> Row:
        """The reductions of one rank; none where there are none at all."""
        return self.reductions[rank] if self.reductions else ()

    @property
    def exposed_reduction(self) -> float:
        """How long reductions go on when all computations have ended: what they add to the makespan."""
        return self.makespan - max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def span(self) -> float:
        """The largest, over ranks, of last end minus the rank's own first start."""
        ranks = zip_longest(self.rows, self.reductions, fillvalue=())
        return max(
            (max(span.end for span in (row[-1], *reduced[-1:])) - row[0].start for row, reduced in ranks if row),
            default=0.0,
        )

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
        ones = (1.0,) * self.placement.num_stages
        share = self.placement.chunks_per_rank
        return tuple(_highest(_curve(_changes(row, ones))) / share for row in self.rows)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most bytes that forwards keep for backwards at once, what waiting weight-gradient halves
        hold included. Raises UsageError when the cost model has no `saved_bytes`.
        """
        if not self.saved_bytes:
            raise UsageError("bytes are not known: give the CostModel saved_bytes (and deferred_bytes) per stage")
        return tuple(_highest(self.memory(rank)) for rank in range(len(self.rows)))

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """What `rank` keeps for its backwards, as (time, amount from then on), in order of time: in bytes where the
        cost model knows them, else in activations as `peak_activations` counts them.
        """
        if self.saved_bytes:
            return _curve(_changes(self.rows[rank], self.saved_bytes, self.deferred_bytes))
        share = self.placement.chunks_per_rank
        return _curve(_changes(self.rows[rank], (1 / share,) * self.placement.num_stages))

    def waits(self) -> list[float]:
        """Where a rank stood idle for a value from another rank: the time from when that was made to when the
        action that needed it began. What a transfer takes, as seen from the timeline.
        """
        return waits(self.rows, self.placement.num_stages)

    def causes(self) -> tuple[tuple[Cause, ...], ...]:
        """Per rank and span, what it began after: the one before it, or one on another rank that made its input."""
        return causes(self.rows, self.placement.num_stages)

    def reduction_causes(self) -> tuple[tuple[Cause, ...], ...]:
        """Per rank and reduction, what it began after: the weight gradient that it waits for, a reduction before it, or
        one of these on another rank that takes part.
        """
        return reduction_causes(self.rows, self.reductions, self.placement.num_stages)

    def critical_path(self) -> tuple[Cause, ...]:
        """The chain of spans that the makespan consists of, each with its cause: the one before it in the chain. It
        ends in reductions where they end last.
        """
        return critical_path(self.rows, self.reductions, self.placement.num_stages)

    def to_json(self) -> str:
        """The timeline as text, to be kept in a file: `Timeline.from_json` gives back an equal one."""
        from pipeflow.core.timeline_json import Fields, to_json  # json is loaded by those who need it

        fields = self.name, self.placement, self.rows, self.saved_bytes, self.deferred_bytes, self.reductions
        return to_json(Fields(*fields))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Reads `to_json`'s text. Raises UsageError naming the rank and span, or the field, that is wrong."""
        from pipeflow.core.timeline_json import from_json

        return cls(*from_json(text))


def _changes(row: Row, saved: tuple[float, ...], deferred: tuple[float, ...] = ()) -> list[tuple[float, float]]:
    """What is kept on one rank, as (time, change). Without backwards nobody keeps anything for long."""
    keeps = any(span.action.kind is not Kind.F for span in row)
    changes: list[tuple[float, float]] = []
    for span in row:
        stage = span.action.stage
        held = deferred[stage] if deferred else 0.0
        match span.action.kind:
            case Kind.F:
                changes.append((span.start, saved[stage]))
                if not keeps:
                    changes.append((span.end, -saved[stage]))
            case Kind.B:
                changes.append((span.end, -saved[stage]))
            case Kind.I:
                changes.append((span.end, held - saved[stage]))
            case Kind.W:
                changes.append((span.end, -held))
    return changes


def _curve(changes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The changes added up; those of one moment are one."""
    curve: list[tuple[float, float]] = []
    amount = 0.0
    for time, change in changes:
        amount += change
        if curve and curve[-1][0] == time:
            curve.pop()
        if not curve or curve[-1][1] != amount:
            curve.append((time, amount))
    return curve


def _highest(curve: list[tuple[float, float]]) -> float:
    return max((amount for _, amount in curve), default=0.0)
