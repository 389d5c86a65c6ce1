"""Plane: named points on two axes, where less is better on both: the Pareto front, the ticks, and room for labels. Must
not contain: the terminal, and the language of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, final

from pipeflow.draw.captions import round_step


class Point(NamedTuple):
    """A named point.

    Attributes:
        name: its name.
        x, y: its coordinates.
    """

    name: str
    x: float
    y: float


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a scatter plot.

    Attributes:
        title: what it measures.
        text: function that writes a number of it.
        base: ticks are powers of this base times 1, 2 or 5.
    """

    title: str
    text: Callable[[float], str]
    base: int = 10

    def ticks(self, values: Collection[float], number: int) -> list[float]:
        """About `number` round values at equal distances, from the first below all of `values` to the first above. They
        begin at 0 unless the values are close together, beyond half of the highest.
        """
        lowest, highest = min(values), max(*values, 1e-12)
        if not highest / 2 < lowest < highest:
            lowest = 0.0
        unit = float(self.base) ** math.floor(math.log(highest - lowest, self.base))
        step = unit * round_step((highest - lowest) / unit / max(number - 1, 1))
        first, last = math.floor(lowest / step + 1e-9), math.ceil(highest / step - 1e-9)
        return [index * step for index in range(first, last + 1)]


def share(value: float, ticks: Sequence[float]) -> float:
    """The place of a value on an axis with these ticks: 0 at the first one, 1 at the last one."""
    return (value - ticks[0]) / (ticks[-1] - ticks[0])


Place = tuple[float, float]
Line = tuple[Place, Place]  # from one to the other
Box = tuple[float, float, float, float]  # left, top, right, bottom


def front(points: Iterable[Point]) -> list[Point]:
    """The Pareto-optimal points, from left to right: no other point is as good on both axes and better on one."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not best or point.y < best[-1].y - 1e-9 or (point.x, point.y) == best[-1][1:]:
            best.append(point)
    return best


class Label(NamedTuple):
    """The place of a label.

    Attributes:
        box: its area.
        leader: the line that joins a label that is far from its anchor to it.
    """

    box: Box
    leader: Line | None


def place_labels(
    anchors: Sequence[Place],
    sizes: Sequence[Place],
    gap: Place,
    room: Box,
    *,
    leftwards: Container[int] = (),
    lines: Iterable[Line] = (),
    reach: float = 0.0,
    beside: float = math.inf,
) -> list[Label | None]:
    """Per anchor, its label, which overlaps no anchor, no other label, no line and no leader; None if there is no such
    place.

    Args:
        anchors, sizes: the points, and the width and height of their labels.
        gap: distance between a label and its anchor.
        room: the area that labels may use.
        leftwards: indices of labels that are placed on the left if possible; others are placed on the right.
        lines: what else is drawn.
        reach: if there is no place beside an anchor, places up to this distance are tried, the nearest first.
        beside: a label farther than this from its anchor has a leader, which crosses no label and no anchor.
    """
    marks: list[Box] = [(x - gap[0] / 2, y - gap[1] / 2, x + gap[0] / 2, y + gap[1] / 2) for x, y in anchors]
    drawn, taken = list(lines), list[Box]()
    labels: list[Label | None] = []
    for index, (anchor, (width, height)) in enumerate(zip(anchors, sizes, strict=True)):
        near = _corners(anchor, width, height, gap[0], -1 if index in leftwards else 1)
        corners = chain(near, _around(anchor, width, height, gap[1], reach))
        boxes = [box for left, top in corners if _inside(box := (left, top, left + width, top + height), room)]
        others = [_shrunk(mark, 0.6) for mark in marks if not _has(mark, anchor)]
        fitting = (
            Label(box, leader)
            for box in boxes
            if not any(_meet(box, one) for one in chain(marks, taken))
            if not any(_crosses(line, box) for line in drawn)
            for leader in [_leader(anchor, box, beside)]
            if leader is None or not any(_crosses(leader, one) for one in chain(taken, others))
        )
        found = next(fitting, None)
        labels.append(found)
        taken += [found.box] if found else []
        drawn += [found.leader] if found and found.leader else []
    return labels


def _corners(anchor: Place, width: float, height: float, gap: float, side: int) -> Iterator[Place]:
    """Places beside an anchor, best first."""
    x, y = anchor
    beside = (x + gap, x - gap - width)[::side]
    yield from ((left, y - height / 2) for left in beside)
    for away in (1, 2):
        for top in (y - (away + 0.5) * height, y + (away - 0.5) * height)[::side]:
            yield from ((left, top) for left in (x - width / 2, *beside))


def _around(anchor: Place, width: float, height: float, gap: float, reach: float) -> Iterator[Place]:
    """Places around an anchor, ring by ring: the middle of the label's nearest edge is on the ring."""
    for ring in range(1, int(reach / gap) + 1):
        for step in range(16):
            angle = math.pi * (step / 8 + 0.5)
            x, y = (anchor[at] + ring * gap * turn(angle) for at, turn in enumerate((math.cos, math.sin)))
            yield x - width / 2 + width / 2 * round(math.cos(angle), 1), y - height / 2


def _leader(anchor: Place, box: Box, beside: float) -> Line | None:
    """The shortest line from an anchor to a label, if it is longer than `beside`."""
    end = min(max(anchor[0], box[0]), box[2]), min(max(anchor[1], box[1]), box[3])
    return (anchor, end) if math.dist(anchor, end) > beside else None


def _shrunk(box: Box, part: float) -> Box:
    """A box, shrunk to `part` of its size around its middle."""
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    width, height = part * (box[2] - box[0]) / 2, part * (box[3] - box[1]) / 2
    return x - width, y - height, x + width, y + height


def _crosses(line: Line, box: Box) -> bool:
    """Whether a line goes through the inner of a box."""
    first, last = 0.0, 1.0  # the part of the line that is between the box's sides
    for start, end, low, high in zip(*line, box[:2], box[2:], strict=True):
        if start == end:
            if not low < start < high:
                return False
        else:
            enters, leaves = sorted(((low - start) / (end - start), (high - start) / (end - start)))
            first, last = max(first, enters), min(last, leaves)
    return first < last


def _has(box: Box, place: Place) -> bool:
    return box[0] < place[0] < box[2] and box[1] < place[1] < box[3]


def _inside(box: Box, room: Box) -> bool:
    return box[0] >= room[0] and box[1] >= room[1] and box[2] <= room[2] and box[3] <= room[3]


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
