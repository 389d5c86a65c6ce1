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
Box = tuple[float, float, float, float]  # left, top, right, bottom


def front(points: Iterable[Point]) -> list[Point]:
    """The Pareto-optimal points, from left to right: no other point is as good on both axes and better on one."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not best or point.y < best[-1].y - 1e-9 or (point.x, point.y) == best[-1][1:]:
            best.append(point)
    return best


def place_labels(
    anchors: Sequence[Place],
    sizes: Sequence[Place],
    gap: Place,
    room: Box,
    *,
    leftwards: Container[int] = (),
    lower: Sequence[float] = (),
    reach: float = 0.0,
) -> list[Place | None]:
    """Per anchor, the top left corner of its label, where it overlaps no anchor and no earlier label; None if there is
    no such place.

    Args:
        anchors, sizes: the points, and the width and height of their labels.
        gap: distance between a label and its anchor.
        room: the area that labels may use.
        leftwards: indices of labels that are placed on the left if possible; others are placed on the right.
        lower: per label, how much lower it is placed beside its anchor. Empty: 0.
        reach: if there is no place beside an anchor, places up to this distance are tried, the nearest first. Places
            whose line to the anchor crosses neither another anchor nor a label come first.
    """
    taken: list[Box] = [(x - gap[0] / 2, y - gap[1] / 2, x + gap[0] / 2, y + gap[1] / 2) for x, y in anchors]
    corners: list[Place | None] = []
    for index, (anchor, (width, height)) in enumerate(zip(anchors, sizes, strict=True)):
        beside = anchor[0], anchor[1] + (lower[index] if lower else 0.0)
        near = _corners(beside, width, height, gap[0], -1 if index in leftwards else 1)
        left_tops = chain(near, _around(anchor, width, height, reach))
        boxes = ((left, top, left + width, top + height) for left, top in left_tops)
        fitting = [box for box in boxes if _inside(box, room) and not any(_meet(box, one) for one in taken)]
        inner = [_shrunk(box, 0.6) for box in taken]
        clear = (box for box in fitting if not _crosses(anchor, nearest(anchor, box), inner))
        found = next(clear, fitting[0] if fitting else None)
        taken += [found] if found else []
        corners.append(found and found[:2])
    return corners


def _corners(anchor: Place, width: float, height: float, gap: float, side: int) -> Iterator[Place]:
    """Places beside an anchor, best first."""
    x, y = anchor
    beside = (x + gap, x - gap - width)[::side]
    yield from ((left, y - height / 2) for left in beside)
    for away in (1, 2):
        for top in (y - (away + 0.5) * height, y + (away - 0.5) * height)[::side]:
            yield from ((left, top) for left in (x - width / 2, *beside))


def _around(anchor: Place, width: float, height: float, reach: float) -> Iterator[Place]:
    """Places around an anchor, ring by ring: the middle of the label's nearest edge is on the ring."""
    for ring in range(1, int(reach / height) + 1):
        for step in range(16):
            angle = math.pi * (step / 8 + 0.5)
            x, y = (anchor[at] + ring * height * turn(angle) for at, turn in enumerate((math.cos, math.sin)))
            yield x - width / 2 + width / 2 * round(math.cos(angle), 1), y - height / 2


def nearest(place: Place, box: Box) -> Place:
    """The point of a box that is nearest to `place`."""
    return min(max(place[0], box[0]), box[2]), min(max(place[1], box[1]), box[3])


def _shrunk(box: Box, part: float) -> Box:
    """A box, shrunk to `part` of its size around its middle."""
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    width, height = part * (box[2] - box[0]) / 2, part * (box[3] - box[1]) / 2
    return x - width, y - height, x + width, y + height


def _crosses(start: Place, end: Place, boxes: Iterable[Box]) -> bool:
    """Whether a line goes through one of the boxes. Boxes in which it starts do not count."""
    boxes = [box for box in boxes if not (box[0] < start[0] < box[2] and box[1] < start[1] < box[3])]
    steps = int(math.dist(start, end) / 3) + 1
    line = [
        (start[0] + (end[0] - start[0]) * step / steps, start[1] + (end[1] - start[1]) * step / steps)
        for step in range(steps + 1)
    ]
    return any(box[0] < x < box[2] and box[1] < y < box[3] for box in boxes for x, y in line)


def _inside(box: Box, room: Box) -> bool:
    return box[0] >= room[0] and box[1] >= room[1] and box[2] <= room[2] and box[3] <= room[3]


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
