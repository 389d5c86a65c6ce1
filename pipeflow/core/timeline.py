"""Timeline: when every action ran, planned or measured. The two are one type, so they share one drawing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pipeflow.core.dataflow import DATAFLOW, Content, Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.liveness import Curve, kept
from pipeflow.core.notebook import Shown
from pipeflow.core.placement import Placement
from pipeflow.core.span import Row, Span
from pipeflow.core.text import number


@dataclass(frozen=True, repr=False)
class Timeline(Shown):
    """Per rank, its spans in the order in which they began, on whichever stream; time 0 is the start of the step.

    `makespan` is what a step with a barrier at its end costs; the bubble rates of the zero-bubble paper (arXiv
    2401.10241, section 4) are made of `span`.

    What runs beside computations, as gradient reductions do, counts for makespan and span, not for work.
    What follows from the spans is worked out once, when it is first asked for.

    `saved_bytes`, `deferred_bytes` and `kept_bytes` are the cost model's; empty when it says nothing of memory.
    """

    name: str
    placement: Placement
    rows: tuple[Row, ...]
    saved_bytes: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    kept_bytes: Mapping[Content, tuple[float, ...]] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        sizes = f"{len(self.rows)} ranks, {sum(map(len, self.rows))} spans, makespan {number(self.makespan)}"
        return f"<Timeline {self.name!r}: {sizes}>"

    def __iter__(self) -> Iterator[Span]:
        for row in self.rows:
            yield from row

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """Those on which anything runs."""
        return tuple(stream for stream in Stream if stream in self._by_stream)

    def on(self, stream: Stream) -> tuple[Row, ...]:
        """Per rank, its spans on one stream, in the order in which they ran."""
        return self._by_stream.get(stream, ((),) * len(self.rows))

    @cached_property
    def _by_stream(self) -> dict[Stream, tuple[Row, ...]]:
        """Of the streams on which anything runs, what `on` says."""
        stream_of = {kind: flow.stream for kind, flow in DATAFLOW.items()}
        found: defaultdict[Stream, list[list[Span]]] = defaultdict(lambda: [[] for _ in self.rows])
        for rank, row in enumerate(self.rows):
            for span in row:
                found[stream_of[span.action.kind]][rank].append(span)
        return {stream: tuple(map(tuple, rows)) for stream, rows in found.items()}

    @cached_property
    def num_microbatches(self) -> int:
        """How many microbatches run."""
        return len({span.action.microbatch for row in self.rows for span in row})

    @cached_property
    def makespan(self) -> float:
        """Last end minus time 0."""
        return max((span.end for row in self.rows for span in row), default=0.0)

    @property
    def exposed(self) -> float:
        """How long what runs beside computations goes on when all of these have ended: what it adds to the makespan."""
        return self.makespan - max((row[-1].end for row in self.on(Stream.COMPUTE) if row), default=0.0)

    @cached_property
    def span(self) -> float:
        """The largest, over ranks, of last end minus the rank's own first start."""
        return max((max(span.end for span in row) - row[0].start for row in self.rows if row), default=0.0)

    @cached_property
    def work(self) -> float:
        """The longest that a rank computes."""
        return max((sum(span.end - span.start for span in row) for row in self.on(Stream.COMPUTE)), default=0.0)

    @property
    def makespan_bubble_ratio(self) -> float:
        """1 - work / makespan: the part of a step in which the busiest rank is idle. Drawings and tables call it the
        bubble.
        """
        return 1 - self.work / self.makespan if self.makespan else 0.0

    @property
    def bubble_ratio(self) -> float:
        """1 - work / span: the zero-bubble papers' bubble rate, which leaves out that ranks begin one after the other.
        Drawings and tables call it the bubble of the span.
        """
        return 1 - self.work / self.span if self.span else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank, the most activations alive at once, in microbatches of the rank's whole share of the
        model. An activation lives from its F to the end of its B or I; without backwards nobody keeps it, and
        there is the one being made.
        """
        return tuple(map(_highest, self._activations))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most bytes kept at once: what forwards keep for backwards, what waiting weight-gradient halves
        hold, and what else has a size. Raises UsageError when the cost model has no `saved_bytes`.
        """
        if not self.saved_bytes:
            raise UsageError("bytes are not known: give the CostModel saved_bytes (and deferred_bytes) per stage")
        return tuple(map(_highest, self._bytes))

    def memory(self, rank: int) -> Curve:
        """What `rank` keeps for its backwards, as (time, amount from then on), in order of time: in bytes where the
        cost model knows them, else in activations as `peak_activations` counts them.
        """
        return self._bytes[rank] if self.saved_bytes else self._activations[rank]

    @cached_property
    def _activations(self) -> tuple[Curve, ...]:
        ones = {Content.SAVED: (1.0,) * self.placement.num_stages}
        share = self.placement.chunks_per_rank
        return tuple(tuple((time, amount / share) for time, amount in kept(row, ones)) for row in self.rows)

    @cached_property
    def _bytes(self) -> tuple[Curve, ...]:
        known = {Content.SAVED: self.saved_bytes, Content.DEFERRED: self.deferred_bytes, **self.kept_bytes}
        sizes = {content: sizes for content, sizes in known.items() if sizes}
        return tuple(kept(row, sizes) for row in self.rows)

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
