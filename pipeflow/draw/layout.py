"""Layout: from times to columns. What must not live here: colours, letters, and rich."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import Stream
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline


class Piece(NamedTuple):
    """Columns `first` to `end` (excluded) of one rank's line, and what runs there.

    `action` is None when the piece is one column of a line so dense that a column holds many actions; `kind`
    and `chunk` are then what the column shows. `joined` says that the piece after it is the other half of its pair.
    """

    kind: Kind
    chunk: int
    first: int
    end: int
    action: Action | None
    joined: bool = False

    @property
    def width(self) -> int:
        return self.end - self.first


def num_chunks(timeline: Timeline) -> int:
    """The most stages that a rank holds."""
    return max(len(timeline.placement.stages_of(rank)) for rank in range(len(timeline.rows)))


def fit(timelines: Iterable[Timeline], width: int) -> float:
    """The columns per unit of time that make the longest timeline at most `width` columns wide. When all times
    are multiples of the shortest span, a whole number of columns per shortest span, so that equals look equal.
    """
    drawn = list(timelines)
    spans = [span for timeline in drawn for span in computations(timeline)]
    horizon = max((timeline.makespan for timeline in drawn), default=0.0)
    if not horizon:
        return 0.0
    unit = shortest(spans)
    columns = math.floor(width * unit / horizon + 1e-6)
    regular = all(
        math.isclose(time, round(time), abs_tol=1e-6) for span in spans for time in (span.start / unit, span.end / unit)
    )
    return columns / unit if regular and columns else width / horizon


def computations(timeline: Timeline) -> Iterator[Span]:
    """Rank by rank, without what runs beside them."""
    return chain.from_iterable(timeline.on(Stream.COMPUTE))


def beside(timeline: Timeline) -> list[Row]:
    """Per rank, what runs beside computations."""
    return [tuple(span for span in row if span.stream is not Stream.COMPUTE) for row in timeline.rows]


def shortest(spans: Iterable[Span]) -> float:
    """The shortest time that a span takes; those that take none do not count."""
    return min((span.end - span.start for span in spans if span.end > span.start), default=1.0)


def pieces(timeline: Timeline, scale: float) -> list[list[Piece]]:
    """Per rank, its pieces from left to right, at `scale` columns per unit of time. Between them it is idle.

    When a span is at least a column wide on average, every span is a piece; else every column is one.
    """
    durations = [span.end - span.start for span in computations(timeline)]
    draw = _blocks if sum(durations) * scale >= len(durations) else _columns
    lines = []
    for rank, row in enumerate(timeline.on(Stream.COMPUTE)):
        chunks = {stage: chunk for chunk, stage in enumerate(timeline.placement.stages_of(rank))}
        lines.append(draw(row, chunks, scale))
    return lines


def _blocks(row: tuple[Span, ...], chunks: dict[int, int], scale: float) -> list[Piece]:
    """One piece a span; what is narrower than half a column may vanish, and what overlaps is cut."""
    blocks: list[Piece] = []
    for span, following in zip(row, (*row[1:], *row[-1:]), strict=True):
        first, end = round_half_up(span.start * scale), round_half_up(span.end * scale)
        first = max(first, blocks[-1].end if blocks else 0)
        if first < end:
            joined = following.action == span.partner
            blocks.append(Piece(span.action.kind, chunks[span.action.stage], first, end, span.action, joined))
    return blocks


def lines(timeline: Timeline, scale: float) -> list[list[Piece]]:
    """As `pieces`, and where a rank is idle, what runs beside its computations."""
    ranks = enumerate(zip(pieces(timeline, scale), beside(timeline), strict=True))
    return [_with(row, line, timeline.placement.stages_of(rank), scale) for rank, (line, row) in ranks]


def _with(row: Row, line: list[Piece], stages: tuple[int, ...], scale: float) -> list[Piece]:
    """The pieces of a line and those of `row` where it has none."""
    found = list(line)
    gaps = pairwise((0, *chain.from_iterable((piece.first, piece.end) for piece in line), sys.maxsize))
    for start, until in list(gaps)[::2]:
        for span in row:
            first, end = max(round_half_up(span.start * scale), start), min(round_half_up(span.end * scale), until)
            if first < end:
                found.append(Piece(span.action.kind, stages.index(span.action.stage), first, end, span.action))
                start = end
    return sorted(found, key=lambda piece: piece.first)


def heights(curve: list[tuple[float, float]], makespan: float, scale: float) -> list[float]:
    """Per column the most of what `curve` says, as (time, amount from then on): a peak is seen however short it is."""
    line = [0.0] * round_half_up(makespan * scale)
    for (time, amount), (until, _) in pairwise([*curve, (makespan, 0.0)]):
        first = round_half_up(time * scale)
        for column in range(first, min(max(round_half_up(until * scale), first + 1), len(line))):
            line[column] = max(line[column], amount)
    return line


def round_half_up(number: float) -> int:
    return math.floor(number + 0.5)


Look = tuple[Kind | None, int]  # kind and chunk
IDLE: Look = (None, 0)


def _columns(row: tuple[Span, ...], chunks: dict[int, int], scale: float) -> list[Piece]:
    """One piece a column. Of what runs in a column, each shows what has run the longest without being shown,
    first the kind and then the chunk, so that a stretch of columns has the colours, and the idle time, of all
    that ran there.
    """
    owed: defaultdict[Look, float] = defaultdict(float)
    line = []
    for column, shares in enumerate(_shares(row, chunks, scale)):
        by_kind: defaultdict[Kind | None, float] = defaultdict(float)
        for look, share in shares.items():
            owed[look] += share
        for (kind, _), debt in owed.items():
            by_kind[kind] += debt
        kind, chunk = max(shares, key=lambda look: (by_kind[look[0]], owed[look]))
        owed[kind, chunk] -= 1
        if kind is not None:
            line.append(Piece(kind, chunk, column, column + 1, None))
    return line


def _shares(row: tuple[Span, ...], chunks: dict[int, int], scale: float) -> list[dict[Look, float]]:
    """Per column, which part of it runs what."""
    width = round_half_up(max((span.end for span in row), default=0.0) * scale)
    shares: list[dict[Look, float]] = [{} for _ in range(width)]
    for span in row:
        look = span.action.kind, chunks[span.action.stage]
        start, end = span.start * scale, span.end * scale
        for column in range(int(start), min(math.ceil(end), width)):
            part = min(end, column + 1) - max(start, column)
            shares[column][look] = shares[column].get(look, 0.0) + part
    for share in shares:
        if (idle := 1 - sum(share.values())) > 1e-9 or not share:
            share[IDLE] = idle
    return shares
