"""Plane: named points on two axes on each of which less is better: which of them are on the front, where the axes have
ticks, and where labels have room. What must not live here: the terminal, and the language of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, final

from pipeflow.draw.times import round_step


class Point(NamedTuple):
    """A name and where it stands."""

    name: str
    x: float
    y: float


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """What is measured, and how a number of it is written: in powers of `base` times 1, 2 or 5."""

    title: str
    text: Callable[[float], str]
    base: int = 10

    def ticks(self, highest: float, number: int) -> list[float]:
        """At most `number` round values from 0 on, the last of them at least `highest`."""
        highest = max(highest, 1e-12)
        unit = float(self.base) ** math.floor(math.log(highest, self.base))
        step = unit * round_step(highest / unit / max(number - 1, 1))
        return [index * step for index in range(math.ceil(highest / step - 1e-9) + 1)]


Place = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats: none is as good on one axis and better on the other. From left to right."""
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
    reach: float = 0.0,
) -> list[Place | None]:
    """Per anchor the left top corner of its label, where it overlaps no anchor and no label before it; None where
    there is no such place. `gap` keeps a label from its anchor. The labels of those in `leftwards` are rather on the
    left, the others on the right. Where there is no place beside an anchor, those up to `reach` away from it are tried,
    the nearest first.
    """
    taken: list[Box] = [(x - gap[0] / 2, y - gap[1] / 2, x + gap[0] / 2, y + gap[1] / 2) for x, y in anchors]
    corners: list[Place | None] = []
    for index, (anchor, (width, height)) in enumerate(zip(anchors, sizes, strict=True)):
        near = _corners(anchor, width, height, gap[0], -1 if index in leftwards else 1)
        left_tops = chain(near, _around(anchor, width, height, reach))
        boxes = ((left, top, left + width, top + height) for left, top in left_tops)
        found = next((box for box in boxes if _inside(box, room) and not any(_meet(box, one) for one in taken)), None)
        taken += [found] if found else []
        corners.append(found and found[:2])
    return corners


def _corners(anchor: Place, width: float, height: float, gap: float, side: int) -> Iterator[Place]:
    """Places beside an anchor, the best first."""
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


def _inside(box: Box, room: Box) -> bool:
    return box[0] >= room[0] and box[1] >= room[1] and box[2] <= room[2] and box[3] <= room[3]


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
