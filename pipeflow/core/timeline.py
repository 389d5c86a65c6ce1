"""Timeline: when every action ran, planned or measured. The two are one type, so they share one drawing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipeflow.core.dataflow import DATAFLOW, Content, Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.liveness import Curve, kept
from pipeflow.core.notebook import Shown
from pipeflow.core.placement import Placement
from pipeflow.core.span import Row, Span


@dataclass(frozen=True, slots=True)
class Timeline(Shown):
    """Per rank, its spans in the order in which they began, on whichever stream; time 0 is the start of the step.

    The measures are those of the zero-bubble paper (arXiv 2401.10241, section 4): `span` is what its
    bubble rates are made of, `makespan` what a step with a barrier at its end costs.

    What runs beside computations, as gradient reductions do, counts for makespan and span, not for work.

    `saved_bytes`, `deferred_bytes` and `kept_bytes` are the cost model's; empty when it says nothing of memory.
    """

    name: str
    placement: Placement
    rows: tuple[Row, ...]
    saved_bytes: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    kept_bytes: Mapping[Content, tuple[float, ...]] = field(default_factory=dict, hash=False)

    def __iter__(self) -> Iterator[Span]:
        for row in self.rows:
            yield from row

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Those on which anything runs."""
        kinds = {span.action.kind for span in self}
        found = {DATAFLOW[kind].stream for kind in kinds}
        return tuple(stream for stream in Stream if stream in found)

    def on(self, stream: Stream) -> tuple[Row, ...]:
        """Per rank, its spans on one stream, in the order in which they ran."""
        kinds = {kind for kind, flow in DATAFLOW.items() if flow.stream is stream}
        return tuple(tuple([span for span in row if span.action.kind in kinds]) for row in self.rows)

    @property
    def makespan(self) -> float:
        """Last end minus time 0."""
        return max((span.end for span in self), default=0.0)

    @property
    def exposed(self) -> float:
        """How long what runs beside computations goes on when all of these have ended: what it adds to the makespan."""
        return self.makespan - max((row[-1].end for row in self.on(Stream.COMPUTE) if row), default=0.0)

    @property
    def span(self) -> float:
        """The largest, over ranks, of last end minus the rank's own first start."""
        return max((max(span.end for span in row) - row[0].start for row in self.rows if row), default=0.0)

    @property
    def work(self) -> float:
        """The longest that a rank computes."""
        return max((sum(span.end - span.start for span in row) for row in self.on(Stream.COMPUTE)), default=0.0)

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
        ones = {Content.SAVED: (1.0,) * self.placement.num_stages}
        share = self.placement.chunks_per_rank
        return tuple(_highest(kept(row, ones)) / share for row in self.rows)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most bytes kept at once: what forwards keep for backwards, what waiting weight-gradient halves
        hold, and what else has a size. Raises UsageError when the cost model has no `saved_bytes`.
        """
        if not self.saved_bytes:
            raise UsageError("bytes are not known: give the CostModel saved_bytes (and deferred_bytes) per stage")
        return tuple(_highest(self.memory(rank)) for rank in range(len(self.rows)))

    def memory(self, rank: int) -> Curve:
        """What `rank` keeps for its backwards, as (time, amount from then on), in order of time: in bytes where the
        cost model knows them, else in activations as `peak_activations` counts them.
        """
        if self.saved_bytes:
            known = {Content.SAVED: self.saved_bytes, Content.DEFERRED: self.deferred_bytes, **self.kept_bytes}
            return kept(self.rows[rank], {content: sizes for content, sizes in known.items() if sizes})
        share = self.placement.chunks_per_rank
        return kept(self.rows[rank], {Content.SAVED: (1 / share,) * self.placement.num_stages})

    def to_json(self) -> str:
        """The timeline as text, to be kept in a file: `Timeline.from_json` gives back an equal one."""
        from pipeflow.core.timeline_json import Fields, to_json  # json is loaded by those who need it

        memory = self.saved_bytes, self.deferred_bytes, self.kept_bytes
        return to_json(Fields(self.name, self.placement, self.rows, *memory))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Reads `to_json`'s text. Raises UsageError naming the rank and span, or the field, that is wrong."""
        from pipeflow.core.timeline_json import from_json

        return cls(*from_json(text))


def _highest(curve: Curve) -> float:
    return max((amount for _, amount in curve), default=0.0)
