"""Frame: the places of a drawing's lanes, in pixels. Must not contain: colours, and the language of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.cost import SMALLEST
from pipeflow.core.dataflow import Stream
from pipeflow.core.liveness import Curve
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline
from pipeflow.draw.column_pieces import fit, shortest
from pipeflow.draw.lane_heights import SPACE, Heights, heights
from pipeflow.draw.lane_rows import lanes
from pipeflow.draw.memory import amount_text, peaks

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
