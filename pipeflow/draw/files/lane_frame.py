"""Frame: the places of the lanes of an SVG, in pixels, with the critical path over them, and lanes whose spans are too
narrow to be blocks, as strips in their average colour. Must not contain: the blocks themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.cost import SMALLEST
from pipeflow.core.dataflow import Stream
from pipeflow.core.liveness import Curve
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import amount_text, peaks
from pipeflow.draw.colours import average, css, shade
from pipeflow.draw.lane_times import SPACE, Heights, Line, Mixture, fit, heights, lanes, shortest

LEAST, NARROWEST, WIDEST = 300.0, 560.0, 1400.0  # width of the lanes: least, least while spans stay narrow, largest
SHORTEST = 20, 44  # width of the shortest span: wanted, at most


@dataclass(frozen=True, slots=True)
class Frame:
    """The places of lanes. A rank has a lane for each of `streams`, then one for its memory, and then a gap.

    Attributes:
        left, top: where the lanes begin.
        width: the width of the lanes.
        right: the room to the right of the lanes, for the peak of each rank.
        scale: pixels per unit of time.
        heights: the heights of lanes.
        streams: the streams, computations first.
    """

    left: float
    top: float
    width: float
    right: float
    scale: float
    heights: Heights
    streams: tuple[Stream, ...]

    def x(self, time: float) -> float:
        """The horizontal place of a time."""
        return self.left + time * self.scale

    def y(self, rank: int, stream: Stream = Stream.COMPUTE) -> float:
        """The top of a rank's lane."""
        return self._top(rank) + self.heights.offset(self.streams.index(stream))

    def height(self, stream: Stream) -> int:
        """The height of the lanes of a stream."""
        return self.heights.lane if stream is Stream.COMPUTE else self.heights.beside

    def floor(self, rank: int) -> float:
        """The bottom of a rank's memory."""
        return self._top(rank) + self.heights.offset(len(self.streams)) - SPACE + self.heights.memory

    def _top(self, rank: int) -> float:
        pitch = self.heights.offset(len(self.streams)) - SPACE + self.heights.memory + self.heights.gap
        return self.top + rank * pitch


def frame(timeline: Timeline, top: float) -> Frame:
    """The frame for a timeline: as wide as its blocks need, within limits; the more ranks, the flatter."""
    drawn = lanes(timeline)
    horizon, unit = timeline.makespan if timeline.makespan >= SMALLEST else 0.0, shortest([timeline])
    wanted = min(max(horizon / unit * SHORTEST[0], NARROWEST), WIDEST)
    scale = fit([timeline], int(wanted))
    if scale * unit < 4 and horizon:  # whole pixels per span would leave too much of the width empty
        scale = wanted / horizon
    scale = min(scale, SHORTEST[1] / unit)
    if horizon:
        scale = max(scale, LEAST / horizon)
    return Frame(
        left=24 + max(6.5 * len(drawn[-1][0].name), *(5 * len(lane.name) for lane in drawn[-1])),
        top=top,
        width=horizon * scale or LEAST,
        right=22 + 6.5 * max(4, *(len(amount_text(timeline, peak)) for peak in peaks(timeline))),
        scale=scale,
        heights=heights(len(drawn)),
        streams=tuple(lane.stream for lane in drawn[0]),
    )


class SpanBox(NamedTuple):
    """A span, and its left and right edge."""

    span: Span
    first: float
    end: float

    @property
    def joined(self) -> bool:
        """Whether it is the first action of a pair, which is a forward."""
        return self.span.partner is not None and self.span.action.kind is Kind.F


def blocks(row: Row, at: Frame) -> list[SpanBox]:
    """The spans of a row that take time. Overlapping ones are cut."""
    found: list[SpanBox] = []
    for span in row:
        first = max(at.x(span.start), found[-1].end if found else at.left)
        end = at.x(span.end)
        if end - first > 1e-3:
            found.append(SpanBox(span, first, end))
    return found


def steps(curve: Curve, at: Frame, finest: float) -> list[tuple[float, float]]:
    """A memory curve as (x, amount from there on), with at most one step every `finest` pixels. A step has the highest
    amount of those that it stands for, so no peak is lost.
    """
    shown: list[tuple[float, float]] = []
    for time, memory in curve:
        x = at.x(time)
        if shown and x - shown[-1][0] < finest:
            shown[-1] = shown[-1][0], max(shown[-1][1], memory)
        elif not shown or shown[-1][1] != memory:
            shown.append((x, memory))
    if shown and curve[-1][1] != shown[-1][1]:
        shown.append((max(at.x(curve[-1][0]), shown[-1][0]), curve[-1][1]))
    return shown


def path_marks(path: Sequence[Span], at: Frame, *, blocks: bool, finest: float) -> Iterator[str]:
    """The marks of the critical path. With `blocks`: a frame around each of its blocks, and a line wherever it changes
    rank. Otherwise: one line along the middle of the lanes, with corners at least `finest` pixels apart.
    """
    if blocks:
        for span in path:
            if (width := at.x(span.end) - at.x(span.start)) > 0:
                y, height = at.y(span.rank, span.stream), at.height(span.stream)
                place = f'x="{at.x(span.start) + 0.25:.2f}" y="{y - 0.75:.2f}" height="{height + 1.5}"'
                yield f'<rect class="critical" {place} width="{max(width - 1.5, 0.5):.2f}" rx="3"/>'
        for before, span in pairwise(path):
            if before.rank != span.rank:
                yield f'<path class="critical" d="{_link(before, span, at)}"/>'
    else:
        yield f'<path class="critical" d="{_path_line(path, at, finest)}"/>'


def _link(before: Span, span: Span, at: Frame) -> str:
    """A line from the edge of one block to the edge of the next one, on another rank."""
    down = span.rank > before.rank
    y = at.y(before.rank, before.stream) + (at.height(before.stream) if down else 0)
    tip = at.y(span.rank, span.stream) + (0 if down else at.height(span.stream))
    return f"M{at.x(before.end):.2f} {y:g}L{at.x(span.start):.2f} {tip:g}"


def _path_line(path: Sequence[Span], at: Frame, finest: float) -> str:
    """A line through the middle of the lanes, with at most one corner every `finest` pixels."""
    corners: list[tuple[float, float]] = []
    for span in path:
        y = at.y(span.rank, span.stream) + at.height(span.stream) / 2
        for x in (at.x(span.start), at.x(span.end)):
            if not corners or x - corners[-1][0] >= finest:
                corners.append((x, y))
    return "M" + "L".join(f"{x:.1f} {y:g}" for x, y in corners)


STEPS = 32  # steps of each colour component, so that columns that look alike share a path


def strips(line: Line, chunks: int, start: str, height: float, finest: float) -> Iterator[str]:
    """One path per colour, from the point that `start` moves to, with columns `finest` pixels wide. Idle time is
    transparent, so that a strip looks right on a light and on a dark ground.
    """
    columns: defaultdict[tuple[str, float], list[tuple[int, int]]] = defaultdict(list)
    for piece in line:
        if isinstance(piece, Mixture):
            columns[_mixed(piece, chunks)].append((piece.first, piece.end))
        else:
            columns[shade(piece.kind, piece.chunk, chunks), 1.0].append((piece.first, piece.end))
    for (colour, opacity), ends in sorted(columns.items()):
        covers = "" if opacity == 1 else f' stroke-opacity="{opacity:.3g}"'
        look = f'class="blocks" stroke-width="{height}" stroke="{colour}"{covers}'
        yield f'<path {look} d="{start}{_dashes(ends, finest)}"/>'


def _mixed(mixture: Mixture, chunks: int) -> tuple[str, float]:
    """The colour of a column as CSS writes it, and its opacity."""
    (red, green, blue), busy = average(mixture.shares, chunks)
    red, green, blue = (round(part / 255 * STEPS) * 255 / STEPS for part in (red, green, blue))
    return css((red, green, blue)), round(busy * STEPS) / STEPS


def _dashes(columns: Iterable[tuple[int, int]], finest: float) -> str:
    """Columns as a line with gaps. Adjacent columns are one dash."""
    dashes: list[list[int]] = []
    for first, end in columns:
        if dashes and dashes[-1][1] == first:
            dashes[-1][1] = end
        else:
            dashes.append([first, end])
    ends = [0, *(end for _, end in dashes)]
    return "".join(
        f"m{(first - before) * finest:g} 0h{(end - first) * finest:g}"
        for before, (first, end) in zip(ends, dashes, strict=False)
    )
