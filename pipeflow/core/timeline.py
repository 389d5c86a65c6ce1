"""Timeline: when every action ran, simulated or measured. Both have this one type, so all drawings and measures work
for both; and timelines as JSON. Must not contain: how times come about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import itemgetter
from typing import Any

from pipeflow.core.action import Action
from pipeflow.core.cost import LARGEST, CostModel, require_unit, slice_lengths
from pipeflow.core.dataflow import ACROSS, DATAFLOW, SEVERAL, Content, Stream
from pipeflow.core.errors import UsageError, require_type
from pipeflow.core.factors import Factors, factors_of, is_table, table_of
from pipeflow.core.files import number as finite
from pipeflow.core.files import parse
from pipeflow.core.liveness import CHANGES, REDUCED, MemoryChange, memory_changes
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule, slices_of
from pipeflow.core.text import Shown, number


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, with its start and end in the timeline's unit of time.

    The two actions of a pair have one span each, one after the other. Because the actions overlap, these spans are
    shorter than the actions alone.

    Attributes:
        action: the action.
        rank: the rank that runs it.
        start, end: when it starts and ends.
        partner: the other action of its pair; None outside a pair.
        exchange: the part of its time in which the rank computes nothing, because it waits for tokens of experts.
    """

    action: Action
    rank: int
    start: float
    end: float
    partner: Action | None = None
    exchange: float = 0.0

    @property
    def stream(self) -> Stream:
        """The stream that the action runs on."""
        return DATAFLOW[self.action.kind].stream


Row = tuple[Span, ...]
"""The spans of one rank, in the order of their starts."""
Curve = tuple[tuple[float, float], ...]
"""(time, amount from that time on), in order of time."""


def kept(
    row: Row,
    sizes: Mapping[Content, Sequence[float]],
    factors: Sequence[Sequence[float]] = (),
    lengths: Sequence[float] = (),
) -> Curve:
    """The amount that a rank keeps while it runs `row`. `sizes` has the amount per content and stage. Values that no
    action of the row uses, such as activations without backwards, are kept only while the action that makes them runs.
    Stages without a size keep nothing. With `factors` per stage and microbatch, each microbatch keeps its multiple of
    that, and a slice keeps its part of it: `lengths` has the share of each slice. What passes between slices lies in a
    buffer for all slices that need it, from the action that first makes it to the end of the first slice's backward.
    """
    actions = [span.action for span in row]
    effects = memory_changes(actions)
    used = frozenset(content for change in {*effects} for content in change.frees)
    table = {id(change): _memory_effects(change, used, sizes) for change in (*CHANGES.values(), *REDUCED.values())}
    changes: list[tuple[float, float]] = []
    for span, change in zip(row, effects, strict=True):
        at_start, at_end = table[id(change)]
        stage, alike = span.action.stage, not factors or span.action.kind in SEVERAL
        factor = 1 if alike else factors[stage][span.action.microbatch]
        if span.action.slice is not None and span.action.kind not in SEVERAL:
            changes += changes_of_buffers(span, sizes, factor, lengths)
            factor = factor * lengths[span.action.slice]
        if at_start:
            changes.append((span.start, at_start[stage] * factor))
        if at_end:
            changes.append((span.end, at_end[stage] * factor))
    return _added_up(sorted(changes, key=itemgetter(0)))


def changes_of_buffers(
    span: Span, sizes: Mapping[Content, Sequence[float]], factor: float, lengths: Sequence[float]
) -> Iterator[tuple[float, float]]:
    """The changes by buffers of what passes between slices: of keys for all tokens, of their gradients for those before
    the last slice.
    """
    place, made = span.action.slice, {content for content, _ in DATAFLOW[span.action.kind].makes}
    for content in (each for each in ACROSS if each in sizes):
        share, first = (1.0, 0) if ACROSS[content] > 0 else (1 - lengths[-1], len(lengths) - 1)
        amount = factor * share * sizes[content][span.action.stage]
        if content in made and place == first:
            yield span.start, amount
        if Content.KEYS_GRADIENT in made and place == 0:
            yield span.end, -amount


def _memory_effects(
    change: MemoryChange, used: frozenset[Content], sizes: Mapping[Content, Sequence[float]]
) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """Per stage, the change at an action's start and at its end. Empty if nothing changes."""
    frees = (*change.frees, *(content for content in change.from_start if content not in used))
    begins = [sizes[content] for content in change.from_start if content in sizes]
    comes = [sizes[content] for content in change.from_end if content in sizes and content in used]
    goes = [sizes[content] for content in frees if content in sizes]
    stages = range(max(map(len, sizes.values()), default=0))
    at_start = {stage: sum(size[stage] for size in begins) for stage in stages if begins}
    ends = {stage: sum(size[stage] for size in comes) - sum(size[stage] for size in goes) for stage in stages}
    return defaultdict(float, at_start), defaultdict(float, ends if comes or goes else {})


def _added_up(changes: list[tuple[float, float]]) -> Curve:
    """The running sum of the changes. Changes at the same time are one step."""
    curve: list[tuple[float, float]] = []
    amount = 0.0
    for time, change in changes:
        amount += change
        if curve and curve[-1][0] == time:
            curve.pop()
        if not curve or curve[-1][1] != amount:
            curve.append((time, amount))
    return tuple(curve)


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
        microbatch_factors: those of the cost model. Memory counts each microbatch by its factor, of its stage.
        slice_lengths: the share of each slice in the sequence of its microbatch. Empty: microbatches are whole.
    """

    name: str
    placement: Placement
    rows: tuple[Row, ...]
    saved_bytes: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    kept_bytes: Mapping[Content, tuple[float, ...]] = field(default_factory=dict, hash=False)
    unit: str = ""
    microbatch_factors: Factors = ()
    slice_lengths: tuple[float, ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, rows: tuple[Row, ...], cost: CostModel) -> Timeline:
        """The timeline of `schedule` with these spans, which keeps bytes, unit and factors of `cost`."""
        sizes = dict(cost.sizes)
        own = sizes.pop(Content.SAVED, ()), sizes.pop(Content.DEFERRED, ())
        lengths = slice_lengths(cost, schedule.slices) if schedule.slices > 1 else ()
        return cls(schedule.name, schedule.placement, rows, *own, sizes, cost.unit, cost.microbatch_factors, lengths)

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
    def slices(self) -> int:
        """Into how many slices each microbatch is cut; 1 if microbatches are whole."""
        return slices_of(span.action for row in self.rows for span in row)

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
        given = {Content.SAVED: self.saved_bytes, Content.DEFERRED: self.deferred_bytes, **self.kept_bytes}
        sizes = {content: numbers for content, numbers in given.items() if numbers}
        return tuple(self._kept(row, sizes) for row in self.rows)

    def _kept(self, row: Row, sizes: Mapping[Content, tuple[float, ...]]) -> Curve:
        factors = table_of(self.microbatch_factors, self.placement.num_stages)
        return kept(row, sizes, factors, self.slice_lengths)

    def to_json(self) -> str:
        """The timeline as JSON, with one line per span: action, start, end, and the other action of a pair.
        `Timeline.from_json` reads it back.
        """
        import json  # most commands and programs write none

        optional = ("kept_bytes", "unit", "microbatch_factors", "slice_lengths")
        given = {
            "name": self.name,
            "paths": self.placement.paths,
            "saved_bytes": self.saved_bytes,
            "deferred_bytes": self.deferred_bytes,
            **{name: value for name in optional if (value := getattr(self, name))},
        }
        lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in given.items()]
        rows = ",\n".join("  [" + ",\n   ".join(json.dumps(_cells(span)) for span in row) + "]" for row in self.rows)
        return "{\n" + "".join(lines) + f' "rows": [\n{rows}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Reads the text of `to_json`. Raises UsageError with the rank and span, or the field, that is wrong."""
        given = parse(text)
        if not isinstance(given, dict) or not {"paths", "rows"} <= set(given):
            raise UsageError("this is not a timeline: it lacks paths or rows, which Timeline.to_json writes")
        if unknown := sorted(set(given) - {"paths", *(each.name for each in fields(cls))}):
            raise UsageError(f"a timeline has no field {', '.join(unknown)}")
        placement = Placement(given["paths"])
        rows = _rows(given["rows"], placement)
        kept_bytes = given.get("kept_bytes", {})
        if not isinstance(kept_bytes, dict):
            raise UsageError(f"kept_bytes: {kept_bytes!r} is not an object")
        if unknown := sorted(set(kept_bytes) - set(Content)):
            raise UsageError(f"kept_bytes: there is no content {', '.join(unknown)}; known: {', '.join(Content)}")
        unit = str(given.get("unit", ""))
        require_unit(unit)
        return cls(
            str(given.get("name", "timeline")),
            placement,
            rows,
            _bytes(given.get("saved_bytes", []), "saved_bytes", placement),
            _bytes(given.get("deferred_bytes", []), "deferred_bytes", placement),
            {Content(name): _bytes(value, name, placement) for name, value in kept_bytes.items()},
            unit,
            _factors(given.get("microbatch_factors", []), rows, placement),
            _lengths(given.get("slice_lengths", []), rows),
        )


def require_timeline(timeline: object) -> None:
    """Raises UsageError for anything that is no Timeline, such as a schedule."""
    require_type("timeline", timeline, Timeline, "simulate(schedule) makes one")


def _highest(curve: Curve) -> float:
    return max((amount for _, amount in curve), default=0.0)


def _cells(span: Span) -> list[str | float]:
    partner = "" if span.partner is None else str(span.partner)
    more = [partner, span.exchange] if span.exchange else [partner] if partner else []
    return [str(span.action), span.start, span.end, *more]


def _rows(value: object, placement: Placement) -> tuple[Row, ...]:
    rows = _list(value, "rows")
    if len(rows) != placement.num_ranks:
        raise UsageError(f"rows: there are {len(rows)} for a placement on {placement.num_ranks} ranks")
    return tuple(_row(row, rank, placement) for rank, row in enumerate(rows))


def _row(cells: object, rank: int, placement: Placement) -> Row:
    row: list[Span] = []
    for position, cell in enumerate(_list(cells, f"rank {rank}")):
        where = f"rank {rank}, span {position}"
        try:
            row.append(_span(cell, rank, placement))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        if len(row) > 1 and row[-1].start < row[-2].start:
            raise UsageError(f"{where}: {row[-1].action} starts before {row[-2].action}: sort spans by start")
    return tuple(row)


def _span(cell: object, rank: int, placement: Placement) -> Span:
    if not isinstance(cell, list) or len(cell) not in (3, 4, 5):
        raise UsageError(f'{cell!r} is not a span: write it like ["0F0", 0.0, 1.0]')
    action, *partner = (Action.parse(str(text)) for text in (cell[0], *filter(None, cell[3:4])))
    exchange = _number(cell[4], "the exchange") if len(cell) > 4 else 0.0
    start, end = (_number(time, "a time") for time in cell[1:3])  # negative where a rank starts before rank 0
    if action.stage not in placement.stages_of(rank):
        raise UsageError(f"{action} cannot run here: the rank holds {_stages(placement.stages_of(rank))}")
    if end < start:
        raise UsageError(f"{action} ends at {end}, before its start at {start}")
    if not 0 <= exchange <= (end - start) * (1 + 1e-9):
        raise UsageError(f"{action} takes {end - start}, so its exchange cannot be {exchange}")
    return Span(action, rank, start, end, partner[0] if partner else None, exchange)


def _stages(stages: tuple[int, ...]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _bytes(value: object, name: str, placement: Placement) -> tuple[float, ...]:
    numbers = _amounts(value, name)
    if len(numbers) not in (0, placement.num_stages):
        raise UsageError(f"{name}: there are {len(numbers)} for {placement.num_stages} stages")
    return numbers


def _factors(value: object, rows: tuple[Row, ...], placement: Placement) -> Factors:
    name, given = "microbatch_factors", _list(value, "microbatch_factors")
    table = is_table(given)
    factors = factors_of(
        [_amounts(row, name) for row in given] if table else _amounts(given, name), placement.num_stages
    )
    many = max((span.action.microbatch + 1 for row in rows for span in row), default=0)
    numbers = table_of(factors, 1)
    if numbers and len(numbers[0]) < many:
        raise UsageError(f"{name}: there are {len(numbers[0])} for {many} microbatches")
    return factors


def _lengths(value: object, rows: tuple[Row, ...]) -> tuple[float, ...]:
    numbers = _amounts(value, "slice_lengths")
    parts = [span.action.slice for row in rows for span in row if span.action.slice is not None]
    if parts and len(numbers) <= max(parts):
        raise UsageError(f"slice_lengths: there are {len(numbers)} for {max(parts) + 1} slices")
    return numbers


def _amounts(value: object, name: str) -> tuple[float, ...]:
    numbers = tuple(_number(each, name) for each in _list(value, name))
    if any(number < 0 for number in numbers):
        raise UsageError(f"{name} must not be negative, got {min(numbers)}")
    return numbers


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: {value!r} is not a list")
    return value


def _number(value: object, where: str) -> float:
    found = finite(value, where)
    if abs(found) > LARGEST:
        raise UsageError(f"{where} must be at most {LARGEST:g}, got {value!r}")
    return found
