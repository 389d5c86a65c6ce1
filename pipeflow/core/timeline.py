"""Timeline: when every action ran, simulated or measured. Both have this one type, so all drawings and measures work
for both. Must not contain: how times come about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import DATAFLOW, Content, Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.liveness import Curve, kept, sizes_of
from pipeflow.core.notebook import Shown
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Row, Span
from pipeflow.core.text import number


@dataclass(frozen=True, repr=False)
class Timeline(Shown):
    """When each action of a step ran, planned or measured. Time 0 is the start of the step. Iterating over a timeline
    gives all its spans, rank by rank.

    `makespan` is the time of a step that ends with a barrier. The bubble rate of the zero-bubble paper (arXiv
    2401.10241, section 4) is based on `span`. What runs beside the computations, such as gradient reductions, counts
    for `makespan` and `span`, but not for `work`. Derived numbers are computed on first use and kept.

    Attributes:
        name: name of the schedule.
        placement: which rank holds which stage.
        rows: per rank, its spans on all streams, in the order of their starts.
        saved_bytes, deferred_bytes: those of the cost model. Empty: memory is counted in activations.
        kept_bytes: per further content, the bytes kept per stage.
        unit: "s" if times are in seconds, as in every measured timeline; "" if the unit is not known.
        microbatch_factors: those of the cost model. Memory counts each microbatch by its factor.
    """

    name: str
    placement: Placement
    rows: tuple[Row, ...]
    saved_bytes: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    kept_bytes: Mapping[Content, tuple[float, ...]] = field(default_factory=dict, hash=False)
    unit: str = ""
    microbatch_factors: tuple[float, ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, rows: tuple[Row, ...], cost: CostModel) -> Timeline:
        """The timeline of `schedule` with these spans, which keeps bytes, unit and factors of `cost`."""
        own = {Content.SAVED, Content.DEFERRED}
        further = {content: sizes for content, sizes in cost.sizes.items() if content not in own}
        sizes = cost.saved_bytes, cost.deferred_bytes, further
        return cls(schedule.name, schedule.placement, rows, *sizes, cost.unit, cost.microbatch_factors)

    def __repr__(self) -> str:
        sizes = f"{len(self.rows)} ranks, {sum(map(len, self.rows))} spans, makespan {number(self.makespan)}"
        return f"<Timeline {self.name!r}: {sizes}>"

    def __iter__(self) -> Iterator[Span]:
        for row in self.rows:
            yield from row

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that anything runs on."""
        return tuple(stream for stream in Stream if stream in self._by_stream)

    def on(self, stream: Stream) -> tuple[Row, ...]:
        """Per rank, its spans on one stream, in the order in which they ran."""
        return self._by_stream.get(stream, ((),) * len(self.rows))

    @cached_property
    def _by_stream(self) -> dict[Stream, tuple[Row, ...]]:
        """The result of `on` for every stream that anything runs on."""
        stream_of = {kind: flow.stream for kind, flow in DATAFLOW.items()}
        found: defaultdict[Stream, list[list[Span]]] = defaultdict(lambda: [[] for _ in self.rows])
        for rank, row in enumerate(self.rows):
            for span in row:
                found[stream_of[span.action.kind]][rank].append(span)
        return {stream: tuple(map(tuple, rows)) for stream, rows in found.items()}

    @cached_property
    def num_microbatches(self) -> int:
        """The number of different microbatches in the spans."""
        return len({span.action.microbatch for row in self.rows for span in row})

    @cached_property
    def makespan(self) -> float:
        """The last end of any span, counted from time 0."""
        return max((span.end for row in self.rows for span in row), default=0.0)

    @property
    def exposed(self) -> float:
        """The time from the end of the last computation to the end of the last reduction or other parallel work. The
        makespan is longer by this time.
        """
        return self.makespan - max((row[-1].end for row in self.on(Stream.COMPUTE) if row), default=0.0)

    @cached_property
    def span(self) -> float:
        """The longest time from the first start to the last end of a rank, over all ranks."""
        return max((max(span.end for span in row) - row[0].start for row in self.rows if row), default=0.0)

    @cached_property
    def work(self) -> float:
        """The longest time that a rank computes, over all ranks."""
        return max((sum(span.end - span.start for span in row) for row in self.on(Stream.COMPUTE)), default=0.0)

    @property
    def makespan_bubble_ratio(self) -> float:
        """1 - work / makespan: the share of a step in which the busiest rank is idle. Drawings and tables call it the
        bubble.
        """
        return 1 - self.work / self.makespan if self.makespan else 0.0

    @property
    def bubble_ratio(self) -> float:
        """1 - work / span: the bubble rate of the zero-bubble papers, which ignores that ranks start one after the
        other. Drawings and tables call it the bubble of the span.
        """
        return 1 - self.work / self.span if self.span else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank, the most activations kept at once, in microbatches of the rank's whole share of the model. An
        activation is kept from its F to the end of its B or I. Without backwards an activation is kept only while its F
        runs. An activation counts as often as the factor of its microbatch says.
        """
        return tuple(map(_highest, self._activations))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most bytes kept at once: by forwards for their backwards, by first halves of backwards for
        second halves, and by other contents with a size. Raises UsageError if the cost model has no `saved_bytes`.
        """
        if not self.saved_bytes:
            raise UsageError("bytes are not known: give the CostModel saved_bytes (and deferred_bytes) per stage")
        return tuple(map(_highest, self._bytes))

    def memory(self, rank: int) -> Curve:
        """The memory that `rank` keeps for its backwards, as (time, amount from that time on), in order of time. The
        amount is in bytes if the cost model has them, otherwise in activations as `peak_activations` counts them.
        """
        return self._bytes[rank] if self.saved_bytes else self._activations[rank]

    @cached_property
    def _activations(self) -> tuple[Curve, ...]:
        ones = {Content.SAVED: (1.0,) * self.placement.num_stages}
        share = self.placement.chunks_per_rank
        return tuple(tuple((time, amount / share) for time, amount in self._kept(row, ones)) for row in self.rows)

    @cached_property
    def _bytes(self) -> tuple[Curve, ...]:
        sizes = sizes_of(self.saved_bytes, self.deferred_bytes, self.kept_bytes)
        return tuple(self._kept(row, sizes) for row in self.rows)

    def _kept(self, row: Row, sizes: Mapping[Content, tuple[float, ...]]) -> Curve:
        return kept(row, sizes, self.microbatch_factors)

    def to_json(self) -> str:
        """The timeline as JSON. `Timeline.from_json` reads it back."""
        from pipeflow.core.timeline_json import Fields, to_json  # loads json only when needed

        return to_json(Fields(**{name: getattr(self, name) for name in Fields._fields}))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Reads the text of `to_json`. Raises UsageError with the rank and span, or the field, that is wrong."""
        from pipeflow.core.timeline_json import from_json

        return cls(*from_json(text))


def _highest(curve: Curve) -> float:
    return max((amount for _, amount in curve), default=0.0)
