"""Charts as SVG documents: `scatter_svg`, the plot of `Scatter` with a line through the Pareto front, and `bars_svg`,
stacked bars such as the parts of steps below each other. Must not contain: rich, which is not needed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipeflow.core.text import percent
from pipeflow.draw.captions import escaped
from pipeflow.draw.plane import Axis, Line, Place, Point, front, place_labels, share

WIDTH, HEIGHT = 720, 460
LEFT, TOP, MARGIN, BOTTOM = 78, 52, 30, 392  # the margin is that on the right
LETTER, LINE = 7.4, 17  # pixels: approximate size of a letter
NEAR = 4  # pixels: points nearer than this share a mark
BESIDE = 18  # pixels: a name farther than this from its point is joined to it by a line
REACH = 180  # pixels: a name that has no room within this distance stands below the plot
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.quiet { fill: #6e7781 }
.paper { fill: #ffffff }
.grid { stroke: #d8dee4; stroke-width: 1 }
.front { fill: none; stroke: #3dae6e; stroke-width: 2 }
.beyond { fill: #3dae6e; opacity: 0.08 }
.leader { stroke: #8c959f; stroke-width: 1 }
circle { stroke: #ffffff; stroke-width: 1.5 }
.best { fill: #3dae6e }
.rest { fill: #5c8feb }
circle.marked { stroke: #24292f; stroke-width: 2.5 }
.name { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round }
.strong { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #d0d7de }
  .quiet { fill: #8b949e }
  .paper { fill: #0d1117 }
  .name, circle { stroke: #0d1117 }
  circle.marked { stroke: #d0d7de }
  .grid { stroke: #30363d }
}"""


def scatter_svg(points: Sequence[Point], x: Axis, y: Axis, *, width: int = WIDTH, marked: Collection[str] = ()) -> str:
    """An SVG of named points on the axes `x` and `y`, where less is better on both. Pareto-optimal points are joined by
    a line. A script finds the names in attributes: `data-names` of a mark, `data-name` of each name.

    Args:
        points: the points.
        x, y: the axes.
        width: of the picture, in pixels.
        marked: the names whose points have a ring.
    """
    right = width - MARGIN
    across = x.ticks([point.x for point in points], max(width // 90, 2))
    up = y.ticks([point.y for point in points], 6)

    def at(point_x: float, point_y: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * share(point_x, across), BOTTOM - (BOTTOM - TOP) * share(point_y, up)

    best = front(points)
    title = " against ".join(axis.title.split(" (")[0] for axis in (y, x))  # units stand at the axes
    dots = _dots(points, {point.name for point in best}, [at(point.x, point.y) for point in points])
    steps = _steps([at(point.x, point.y) for point in best], right)
    marks, nameless = _marks(dots, width, marked, list(pairwise(steps)))
    below = _lines(nameless, int((right - LEFT) / LETTER)) if nameless else []
    height = HEIGHT + LINE * len(below)
    body = [
        _text(title[:1].upper() + title[1:], LEFT, 28, "title"),
        *_grid([at(tick, up[0]) for tick in across], [x.text(tick) for tick in across], 0),
        *_grid([at(across[0], tick) for tick in up], [y.text(tick) for tick in up], right),
        _text(x.title, (LEFT + right) / 2, BOTTOM + 42, "quiet", "middle"),
        f'<g transform="rotate(-90)">{_text(y.title, -(TOP + BOTTOM) / 2, 20, "quiet", "middle")}</g>',
        *_front_line(steps),
        *marks,
        *(_names(line, LEFT, HEIGHT + LINE * number - 8, "quiet") for number, line in enumerate(below, start=1)),
    ]
    return _document(title, width, height, STYLE, body)


def _document(title: str, width: int, height: int, style: str, body: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img" aria-label="{escaped(title)}">',
            f"<style>{style}</style>",
            f'<rect class="paper" width="{width}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _grid(places: list[tuple[float, float]], texts: list[str], right: float) -> Iterator[str]:
    """Lines with texts: across as far as `right`, or upright if that is 0."""
    for (left, top), text in zip(places, texts, strict=True):
        if not right:
            yield f'<path class="grid" d="M{left:.1f} {TOP}V{BOTTOM}"/>'
            yield _text(text, left, BOTTOM + 20, "quiet", "middle")
        else:
            yield f'<path class="grid" d="M{LEFT} {top:.1f}H{right}"/>'
            yield _text(text, LEFT - 10, top + 4, "quiet", "end")


def _steps(places: list[Place], right: float) -> list[Place]:
    """The corners of the stepped line along the front."""
    corners = [(places[0][0], float(TOP)), places[0]]
    for x, y in places[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return [*corners, (right, corners[-1][1])]


def _front_line(steps: list[Place]) -> Iterator[str]:
    """The stepped line, and the area of dominated points beyond it."""
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in steps)
    yield f'<path class="beyond" d="{line}V{TOP}Z"/>'
    yield f'<path class="front" d="{line}"/>'


def _marks(dots: list[Dot], width: int, marked: Collection[str], lines: list[Line]) -> tuple[list[str], list[str]]:
    """The marks of the points with their names, and the names that have no room. Points of the front come first, so
    that their names are beside them. A name farther away is joined to its point by a line. No name lies over `lines`.
    """
    drawn: list[str] = []
    names = [_lines(dot.names, min(int((width - LEFT - MARGIN) / LETTER / 2), 30)) for dot in dots]
    sizes = [(max(map(len, each)) * LETTER, len(each) * LINE) for each in names]
    anchors = [(dot.x, dot.y) for dot in dots]
    leftwards = {index for index, dot in enumerate(dots) if dot.good}
    room = LEFT, TOP - LINE, width, BOTTOM + LINE / 2
    labels = place_labels(anchors, sizes, (16, 12), room, leftwards=leftwards, lines=lines, reach=REACH, beside=BESIDE)
    for (x, y), (to_x, to_y) in (label.leader for label in labels if label and label.leader):
        drawn.append(f'<path class="leader" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>')
    for dot in reversed(dots):  # the front is drawn last, on top
        look = ("best" if dot.good else "rest") + " marked" * any(name in marked for name in dot.names)
        said = escaped(",".join(dot.names))
        drawn.append(f'<circle class="{look}" cx="{dot.x:.1f}" cy="{dot.y:.1f}" r="5" data-names="{said}">')
        drawn.append(f"<title>{escaped(', '.join(dot.names))}</title></circle>")
    for dot, label, each in zip(dots, labels, names, strict=True):
        if label is not None:
            left, top, right, _ = label.box
            anchor, x = ("end", right) if left < dot.x - 16 else ("start", left)
            for number, line in enumerate(each):
                look = "name strong" if dot.good else "name"
                drawn.append(_names(line, x, top + 13 + number * LINE, look, anchor))
    return drawn, [name for dot, label in zip(dots, labels, strict=True) if label is None for name in dot.names]


class Dot(NamedTuple):
    """A mark for one or more points.

    Attributes:
        x, y: its place.
        names: names of the points.
        good: whether they are on the Pareto front.
    """

    x: float
    y: float
    names: list[str]
    good: bool


def _dots(points: Sequence[Point], best: set[str], places: list[Place]) -> list[Dot]:
    """The marks, those of the front first. Points so close that one mark would hide the other share a mark."""
    dots: list[Dot] = []
    for point, (x, y) in sorted(zip(points, places, strict=True), key=lambda pair: pair[0].name not in best):
        near = next((dot for dot in dots if math.hypot(dot.x - x, dot.y - y) < NEAR), None)
        if near is None:
            dots.append(Dot(x, y, [point.name], point.name in best))
        else:
            near.names.append(point.name)
    return dots


def _lines(names: Sequence[str], width: int) -> list[str]:
    """Names in lines of at most `width` letters. No name is split."""
    lines = [names[0]]
    for name in names[1:]:
        if len(lines[-1]) + 2 + len(name) > width:
            lines[-1] += ","
            lines.append(name)
        else:
            lines[-1] += f", {name}"
    return lines


def _text(text: str, x: float, y: float, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _names(line: str, x: float, y: float, kind: str, anchor: str = "start") -> str:
    """Names with commas between, each an element."""
    spans = (f'<tspan data-name="{escaped(name)}">{escaped(name)}</tspan>' for name in line.rstrip(",").split(", "))
    comma = "," * line.endswith(",")
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{", ".join(spans)}{comma}</text>'


BARS_MARGIN = 24
BARS_TOP, BAR, EACH = 60, 28, 62  # pixels: where the first bar starts, its height, and from one to the next
ROW, SWATCH = 22, 12  # pixels: a row of the legend, and its square
CELL, NARROW = 92, 40  # pixels: a column of numbers in the legend; blocks that are narrower have no text
COLOURS = (  # of blocks, in the order of the parts; neighbours differ in lightness, too
    *("#3d6fd6", "#8fb4f7", "#1f9e8f", "#dd6bb0", "#b9a3e3", "#f08a3c", "#c6511d", "#f7c64a", "#8a5a2b"),
    *("#d9b38c", "#93a1b5", "#d3dae4", "#7d32e6", "#5aa83c"),
)


class Bar(NamedTuple):
    """A stacked bar.

    Attributes:
        name: written above it.
        parts: the sizes of its blocks, by their names.
    """

    name: str
    parts: dict[str, float]


def bars_svg(title: str, bars: Sequence[Bar], names: Sequence[str], text: Callable[[float], str]) -> str:
    """An SVG of stacked bars on one scale, each with its sum, and a legend with the size of each block.

    Args:
        title: of the picture.
        bars: from above to below.
        names: all names that blocks may have, in the order in which they are stacked.
        text: writes a size.
    """
    longest = max(sum(bar.parts.values()) for bar in bars) or 1.0
    scale = (WIDTH - 2 * BARS_MARGIN) / longest
    shown = [name for name in names if any(name in bar.parts for bar in bars)]
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    legend = BARS_TOP + EACH * len(bars) + 8
    height = legend + ROW * (len(shown) + (len(bars) > 1)) + BARS_MARGIN
    body = [_text(title, BARS_MARGIN, 28, "title")]
    for place, bar in enumerate(bars):
        body += _bar(bar, BARS_TOP + EACH * place, shown, colours, scale, text)
    body += _legend(bars, shown, colours, legend, text)
    style = f"{STYLE}\n.block {{ stroke: none }}\ntext.on {{ fill: #10141c; font-size: 12px }}"
    return _document(title, WIDTH, height, style, body)


def _bar(
    bar: Bar, top: float, names: list[str], colours: dict[str, str], scale: float, text: Callable[[float], str]
) -> Iterator[str]:
    """The name of a bar with its sum, and its blocks from the left."""
    whole, left = sum(bar.parts.values()), float(BARS_MARGIN)
    yield _text(bar.name, BARS_MARGIN, top + 8, "strong")
    yield _text(text(whole), WIDTH - BARS_MARGIN, top + 8, "strong", "end")
    for name in names:
        width = bar.parts.get(name, 0.0) * scale
        if width <= 0:
            continue
        share = percent(bar.parts[name] / whole)
        said = escaped(f"{name}: {text(bar.parts[name])}, {share}")
        look = f'class="block" fill="{colours[name]}" data-name="{escaped(name)}"'
        place = f'x="{left:.1f}" y="{top + 16}" width="{max(width - 1, 0.5):.1f}" height="{BAR}"'
        yield f"<rect {look} {place}><title>{said}</title></rect>"
        if width >= NARROW:
            yield _text(share, left + width / 2, top + 16 + BAR / 2 + 4, "on", "middle")
        left += width


def _legend(
    bars: Sequence[Bar], names: list[str], colours: dict[str, str], top: float, text: Callable[[float], str]
) -> Iterator[str]:
    """A row per name: its colour, and its size in each bar, as many as there is room for."""
    room = (WIDTH - 2 * BARS_MARGIN - 150) // CELL
    columns = [(bar, BARS_MARGIN + 150 + CELL * (place + 1)) for place, bar in enumerate(bars[:room])]
    if len(bars) > 1:
        for number, (_, x) in enumerate(columns, start=1):
            yield _text(str(number), x, top + 12, "quiet", "end")
        top += ROW
    for place, name in enumerate(names):
        y = top + ROW * place
        yield f'<rect x="{BARS_MARGIN}" y="{y + 2}" width="{SWATCH}" height="{SWATCH}" fill="{colours[name]}"/>'
        yield _text(name, BARS_MARGIN + SWATCH + 8, y + 12, "name")
        for bar, x in columns:
            yield _text(text(bar.parts[name]) if name in bar.parts else "-", x, y + 12, "quiet", "end")
