"""Frame: where the lanes of a drawing lie, in pixels. What must not live here: colours, and the language of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.cost import SMALLEST
from pipeflow.core.dataflow import Stream
from pipeflow.core.liveness import Curve
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline
from pipeflow.draw.heights import SPACE, Heights, heights
from pipeflow.draw.lanes import lanes
from pipeflow.draw.memory import amount_text, peaks
from pipeflow.draw.pieces import fit, shortest

LEAST, NARROWEST, WIDEST = 300.0, 560.0, 1400.0  # of the lanes: at least, where spans are not wide enough, at most
SHORTEST = 20, 44  # of the shortest span: the width that it would like, the width that is enough


@dataclass(frozen=True, slots=True)
class Frame:
    """The lanes begin at `left`, `top` and are `width` wide, at `scale` pixels per unit of time. A rank has a lane for
    each of `streams`, the computations first, then one for its memory, and then a gap; to the right there is room for
    its peak.
    """

    left: float
    top: float
    width: float
    right: float
    scale: float
    heights: Heights
    streams: tuple[Stream, ...]

    def x(self, time: float) -> float:
        """Where a time is, from the left."""
        return self.left + time * self.scale

    def y(self, rank: int, stream: Stream = Stream.COMPUTE) -> float:
        """The top of a lane of a rank."""
        return self._top(rank) + self.heights.offset(self.streams.index(stream))

    def height(self, stream: Stream) -> int:
        """How high the lanes of a stream are."""
        return self.heights.lane if stream is Stream.COMPUTE else self.heights.beside

    def floor(self, rank: int) -> float:
        """Where a rank's memory stands."""
        return self._top(rank) + self.heights.offset(len(self.streams)) - SPACE + self.heights.memory

    def _top(self, rank: int) -> float:
        pitch = self.heights.offset(len(self.streams)) - SPACE + self.heights.memory + self.heights.gap
        return self.top + rank * pitch


def frame(timeline: Timeline, top: float) -> Frame:
    """The frame for a timeline: as wide as its blocks need, within limits, and the flatter the more ranks."""
    drawn = lanes(timeline)
    horizon, unit = timeline.makespan if timeline.makespan >= SMALLEST else 0.0, shortest([timeline])
    wanted = min(max(horizon / unit * SHORTEST[0], NARROWEST), WIDEST)
    scale = fit([timeline], int(wanted))
    if scale * unit < 4 and horizon:  # a whole number of pixels per span would leave too much of the width empty
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


class Block(NamedTuple):
    """A span and where it lies from left to right."""

    span: Span
    first: float
    end: float

    @property
    def joined(self) -> bool:
        """Whether it is the first half of a pair, which is a forward."""
        return self.span.partner is not None and self.span.action.kind is Kind.F


def blocks(row: Row, at: Frame) -> list[Block]:
    """The spans of a row that take time; what overlaps is cut."""
    found: list[Block] = []
    for span in row:
        first = max(at.x(span.start), found[-1].end if found else at.left)
        end = at.x(span.end)
        if end - first > 1e-3:
            found.append(Block(span, first, end))
    return found


def steps(curve: Curve, at: Frame, finest: float) -> list[tuple[float, float]]:
    """A memory curve as (x, amount from there on), with at most one step every `finest` pixels: the highest of
    those that it stands for, so that no peak is lost.
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
