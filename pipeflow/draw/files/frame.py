"""Frame: where the lanes of a drawing lie, in pixels. What must not live here: colours, and the language of a file."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline
from pipeflow.draw.layout import computations, fit, shortest
from pipeflow.draw.memory import amount_text, peaks

LEAST, NARROWEST, WIDEST = 300.0, 560.0, 1400.0  # of the lanes: at least, where spans are not wide enough, at most
SHORTEST = 20, 44  # of the shortest span: the width that it would like, the width that is enough


@dataclass(frozen=True, slots=True)
class Frame:
    """The lanes begin at `left`, `top` and are `width` wide, at `scale` pixels per unit of time. A rank has a lane
    of height `lane` for its blocks, one of height `memory` below, and then a `gap`; to the right there is
    room for its peak.
    """

    left: float
    top: float
    width: float
    right: float
    scale: float
    lane: int
    memory: int
    gap: int

    def x(self, time: float) -> float:
        return self.left + time * self.scale

    @property
    def bar(self) -> int:
        """How high reductions are, at a lane's lower edge."""
        return max(ceil(self.lane / 5), 3)

    def y(self, rank: int) -> float:
        return self.top + rank * (self.lane + self.memory + self.gap)


def frame(timeline: Timeline, top: float) -> Frame:
    """The frame for a timeline: as wide as its blocks need, within limits, and the flatter the more ranks."""
    ranks = len(timeline.rows)
    horizon, unit = timeline.makespan, shortest(computations(timeline))
    wanted = min(max(horizon / unit * SHORTEST[0], NARROWEST), WIDEST)
    scale = fit([timeline], int(wanted))
    if scale * unit < 4 and horizon:  # a whole number of pixels per span would leave too much of the width empty
        scale = wanted / horizon
    scale = min(scale, SHORTEST[1] / unit)
    if horizon:
        scale = max(scale, LEAST / horizon)
    lane, memory, gap = heights(ranks)
    return Frame(
        left=24 + 6.5 * len(f"rank {ranks - 1}"),
        top=top,
        width=horizon * scale or LEAST,
        right=22 + 6.5 * max(4, *(len(amount_text(timeline, peak)) for peak in peaks(timeline))),
        scale=scale,
        lane=lane,
        memory=memory,
        gap=gap,
    )


class Heights(NamedTuple):
    """Of what belongs to one rank, in pixels."""

    lane: int
    memory: int
    gap: int


def heights(ranks: int) -> Heights:
    """The flatter the more ranks there are."""
    if ranks <= 8:
        return Heights(24, 16, 8)
    if ranks <= 16:
        return Heights(20, 12, 6)
    return Heights(14, 8, 5) if ranks <= 32 else Heights(9, 7, 3)


class Block(NamedTuple):
    """A span and where it lies from left to right."""

    span: Span
    first: float
    end: float


def blocks(row: Row, at: Frame) -> list[Block]:
    """The spans of a row that take time; what overlaps is cut."""
    found: list[Block] = []
    for span in row:
        first = max(at.x(span.start), found[-1].end if found else at.left)
        end = at.x(span.end)
        if end - first > 1e-3:
            found.append(Block(span, first, end))
    return found


def steps(curve: list[tuple[float, float]], at: Frame, finest: float) -> list[tuple[float, float]]:
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
