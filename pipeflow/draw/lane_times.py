"""Lanes: the spans that drawings show, per rank and stream, the heights of their lanes, and times turned into columns.
Must not contain: colours, letters, and rich.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.cost import SMALLEST
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Curve, Row, Span, Timeline, require_timeline


class Lane(NamedTuple):
    """The spans of one rank on one stream.

    Attributes:
        rank: the rank.
        stream: the stream.
        row: its spans, in order.
        stages: the stages that the rank holds.
    """

    rank: int
    stream: Stream
    row: Row
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        """The rank for its computations, the stream for others."""
        return f"rank {self.rank}" if self.stream is Stream.COMPUTE else self.stream.value

    def chunk(self, span: Span) -> int:
        """The index of a span's stage among the rank's stages."""
        return self.stages.index(span.action.stage)


def all_lanes(timeline: Timeline) -> list[list[Lane]]:
    """Per rank, a lane for its computations, and one for each other stream that anything runs on."""
    streams = dict.fromkeys((Stream.COMPUTE, *timeline.streams))
    rows = zip(*(timeline.on(stream) for stream in streams), strict=True)
    return [
        [Lane(rank, *each, timeline.placement.stages_of(rank)) for each in zip(streams, row, strict=True)]
        for rank, row in enumerate(rows)
    ]


def lanes(timeline: Timeline) -> list[list[Lane]]:
    """The result of `all_lanes` without streams on which nothing takes time, except the computations."""
    ranks = all_lanes(timeline)
    timed = {lane.stream for rank in ranks for lane in rank if any(span.end > span.start for span in lane.row)}
    return [[lane for lane in rank if lane.stream in timed | {Stream.COMPUTE}] for rank in ranks]


def kinds(timelines: Iterable[Timeline]) -> list[Kind]:
    """The kinds of action in the lanes of the timelines, in the order of `Kind`."""
    drawn = [lane for timeline in timelines for rank in lanes(timeline) for lane in rank]
    present = {span.action.kind for lane in drawn for span in lane.row}
    return [kind for kind in Kind if kind in present]


def num_chunks(timeline: Timeline) -> int:
    """The largest number of stages that a rank holds."""
    return max(len(timeline.placement.stages_of(rank)) for rank in range(len(timeline.rows)))


def several(timelines: Timeline | Sequence[Timeline]) -> tuple[Timeline, ...]:
    """One timeline, or a sequence of them, as a tuple. Raises UsageError for an empty sequence."""
    if isinstance(timelines, Timeline):
        return (timelines,)
    if not isinstance(timelines, Sequence) or isinstance(timelines, str):
        require_timeline(timelines)
    if not timelines:
        raise UsageError("there is nothing to draw: give at least one timeline")
    return tuple(timelines)


SPACE = 1  # pixels between the lanes of a rank


class Heights(NamedTuple):
    """The heights of one rank's part of a drawing, in pixels.

    Attributes:
        lane: the lane of its computations.
        beside: the lane of any other stream.
        memory: the lane of its memory.
        gap: the gap before the next rank.
    """

    lane: int
    beside: int
    memory: int
    gap: int

    def offset(self, lane: int) -> int:
        """The distance from the top of the first lane to the top of the one with index `lane`."""
        return 0 if lane == 0 else self.lane + SPACE + (lane - 1) * (self.beside + SPACE)


def heights(ranks: int, cap: bool = False) -> Heights:
    """The heights for a number of ranks: the more ranks, the smaller. With a `cap`, memory has room for a scale."""
    if ranks <= 8:
        return Heights(24, 10, 36 if cap else 16, 8)
    if ranks <= 16:
        return Heights(20, 8, 26 if cap else 12, 6)
    if ranks <= 32:
        return Heights(14, 6, 18 if cap else 8, 5)
    return Heights(9, 4, 12 if cap else 7, 3)


class ColumnPiece(NamedTuple):
    """One action in the columns of a lane.

    Attributes:
        kind, chunk, action: what runs there.
        first, end: its columns, `end` excluded.
        joined: whether the next piece is the other action of its pair.
    """

    kind: Kind
    chunk: int
    first: int
    end: int
    action: Action
    joined: bool = False

    @property
    def width(self) -> int:
        return self.end - self.first

    @property
    def is_computation(self) -> bool:
        return DATAFLOW[self.kind].stream is Stream.COMPUTE


Look = tuple[Kind, int]  # kind and chunk


class Mixture(NamedTuple):
    """One column of a lane in which columns hold several actions.

    Attributes:
        first: the column.
        shares: per kind and chunk, its share of the column and of the columns beside it. The rest is idle.
        shown: the kind and chunk to show if a column can show only one; None is idle.
    """

    first: int
    shares: tuple[tuple[Look, float], ...]
    shown: Look | None

    @property
    def end(self) -> int:
        return self.first + 1


Line = list[ColumnPiece | Mixture]  # from left to right


def fit(timelines: Iterable[Timeline], width: int) -> float:
    """The scale, in columns per unit of time, at which the longest timeline is at most `width` columns wide. If all
    times of computations are multiples of the shortest one, that one gets a whole number of columns, so that equal
    times look equal.
    """
    drawn = list(timelines)
    spans = [span for timeline in drawn for row in timeline.on(Stream.COMPUTE) for span in row]
    horizon = max((timeline.makespan for timeline in drawn), default=0.0)
    if horizon < SMALLEST:
        return 0.0
    unit = shortest(drawn)
    columns = math.floor(width * unit / horizon + 1e-6)
    if not columns:
        return width / horizon
    regular = all(
        math.isclose(time, round(time), abs_tol=1e-6) for span in spans for time in (span.start / unit, span.end / unit)
    )
    return columns / unit if regular else width / horizon


def shortest(timelines: Iterable[Timeline]) -> float:
    """The shortest time of a computation, without those that take no time."""
    rows = (row for timeline in timelines for row in timeline.on(Stream.COMPUTE))
    return min((span.end - span.start for row in rows for span in row if span.end > span.start), default=1.0)


def pieces(lanes: Iterable[list[Lane]], scale: float) -> list[list[Line]]:
    """Per rank and lane, what is in its columns at `scale` columns per unit of time. Columns between are idle.

    If the spans of a stream are at least one column wide on average, every span is a piece; otherwise every column is a
    mixture.
    """
    ranks = list(lanes)
    times: defaultdict[Stream, list[float]] = defaultdict(list)
    for lane in (lane for rank in ranks for lane in rank):
        times[lane.stream] += (span.end - span.start for span in lane.row)
    draw = {stream: _blocks if sum(each) * scale >= len(each) else _columns for stream, each in times.items()}
    return [[draw[lane.stream](lane, scale) for lane in rank] for rank in ranks]


def _blocks(lane: Lane, scale: float) -> Line:
    """One piece per span. Spans narrower than half a column may vanish, and overlapping ones are cut."""
    blocks: Line = []
    for span, following in zip(lane.row, (*lane.row[1:], *lane.row[-1:]), strict=True):
        first, end = round_half_up(span.start * scale), round_half_up(span.end * scale)
        first = max(first, blocks[-1].end if blocks else 0)
        if first < end:
            joined = following.action == span.partner
            blocks.append(ColumnPiece(span.action.kind, lane.chunk(span), first, end, span.action, joined))
    return blocks


def by_column(curve: Curve, makespan: float, scale: float) -> list[float]:
    """Per column, the highest amount of `curve`, given as (time, amount from that time on). So peaks of any length are
    visible.
    """
    line = [0.0] * round_half_up(makespan * scale)
    for (time, amount), (until, _) in pairwise([*curve, (makespan, 0.0)]):
        first = round_half_up(time * scale)
        for column in range(first, min(max(round_half_up(until * scale), first + 1), len(line))):
            line[column] = max(line[column], amount)
    return line


def round_half_up(number: float) -> int:
    """The nearest integer; halves are rounded up."""
    return math.floor(number + 0.5)


def _columns(lane: Lane, scale: float) -> Line:
    """One mixture per column. A column shows the kind, and of that the chunk, which has run for the longest without
    being shown. So a stretch of columns shows kinds, chunks and idle time in the proportion in which they ran.
    """
    owed: defaultdict[Look | None, float] = defaultdict(float)
    line: Line = []
    columns = _shares(lane, scale)
    for column, shares in enumerate(columns):
        idle = 1 - sum(shares.values())
        parts: dict[Look | None, float] = dict(shares.items())
        if idle > 1e-9 or not shares:
            parts[None] = idle
        by_kind: defaultdict[Kind | None, float] = defaultdict(float)
        for look, share in parts.items():
            owed[look] += share
        for look, debt in owed.items():
            by_kind[look and look[0]] += debt
        shown = max(parts, key=lambda look: (by_kind[look and look[0]], owed[look]))
        owed[shown] -= 1
        if shares:
            line.append(Mixture(column, tuple(_smoothed(columns, column)), shown))
    return line


def _smoothed(columns: list[dict[Look, float]], column: int) -> Iterator[tuple[Look, float]]:
    """The shares of a column, with those of the columns beside it at half weight: patterns that repeat every two
    columns or so would be stripes otherwise. Idle columns beside it do not count, so that its edges stay sharp.
    """
    near = [(at, weight) for at, weight in ((column - 1, 1), (column, 2), (column + 1, 1)) if 0 <= at < len(columns)]
    parts = [(columns[at], weight) for at, weight in near if columns[at]]
    whole = sum(weight for _, weight in parts)
    yield from ((look, share * weight / whole) for shares, weight in parts for look, share in shares.items())


def _shares(lane: Lane, scale: float) -> list[dict[Look, float]]:
    """For each column, the share of each kind and chunk."""
    width = round_half_up(max((span.end for span in lane.row), default=0.0) * scale)
    shares: list[dict[Look, float]] = [{} for _ in range(width)]
    for span in lane.row:
        look = span.action.kind, lane.chunk(span)
        start, end = span.start * scale, span.end * scale
        for column in range(int(start), min(math.ceil(end), width)):
            part = min(end, column + 1) - max(start, column)
            shares[column][look] = shares[column].get(look, 0.0) + part
    return shares
