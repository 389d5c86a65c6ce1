"""The scatter of `Scatter` as an SVG document, with a line through the points of the front. No rich is needed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pipeflow.draw.plane import Axis, Point, front, place_labels

WIDTH, HEIGHT = 720, 460
LEFT, TOP, RIGHT, BOTTOM = 78, 52, 690, 392
LETTER, LINE = 7.4, 17  # about the size of a letter
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.quiet { fill: #6e7781 }
.paper { fill: #ffffff }
.grid { stroke: #d8dee4; stroke-width: 1 }
.front { fill: none; stroke: #3dae6e; stroke-width: 2 }
.beyond { fill: #3dae6e; opacity: 0.08 }
.best { fill: #3dae6e }
.rest { fill: #5c8feb }
.name { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round }
.strong { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #d0d7de }
  .quiet { fill: #8b949e }
  .paper { fill: #0d1117 }
  .name { stroke: #0d1117 }
  .grid { stroke: #30363d }
}"""


def scatter_svg(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """Points with their names; those on the front, which no other one beats on both axes, are joined by a line."""
    across = x.ticks(max(point.x for point in points), 8)
    up = y.ticks(max(point.y for point in points), 6)

    def at(point_x: float, point_y: float) -> tuple[float, float]:
        return (
            LEFT + (RIGHT - LEFT) * (point_x / across[-1] if across[-1] else 0),
            BOTTOM - (BOTTOM - TOP) * (point_y / up[-1] if up[-1] else 0),
        )

    best = front(points)
    title = f"{y.title} against {x.title}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
            f' role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
            _text(title[:1].upper() + title[1:], LEFT, 28, "title"),
            *(_grid([at(tick, 0) for tick in across], [x.text(tick) for tick in across], upright=True)),
            *(_grid([at(0, tick) for tick in up], [y.text(tick) for tick in up], upright=False)),
            _text(x.title, (LEFT + RIGHT) / 2, BOTTOM + 42, "quiet", "middle"),
            f'<g transform="rotate(-90)">{_text(y.title, -(TOP + BOTTOM) / 2, 20, "quiet", "middle")}</g>',
            *_front_line([at(point.x, point.y) for point in best]),
            *_marks(points, {point.name for point in best}, [at(point.x, point.y) for point in points]),
            "</svg>\n",
        ]
    )


def _grid(places: list[tuple[float, float]], texts: list[str], *, upright: bool) -> Iterator[str]:
    for (left, top), text in zip(places, texts, strict=True):
        if upright:
            yield f'<path class="grid" d="M{left:.1f} {TOP}V{BOTTOM}"/>'
            yield _text(text, left, BOTTOM + 20, "quiet", "middle")
        else:
            yield f'<path class="grid" d="M{LEFT} {top:.1f}H{RIGHT}"/>'
            yield _text(text, LEFT - 10, top + 4, "quiet", "end")


def _front_line(places: list[tuple[float, float]]) -> Iterator[str]:
    """Steps from the top along the front to the right: what lies beyond them is beaten."""
    (left, top), *others = places
    steps = f"M{left:.1f} {TOP}V{top:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in others) + f"H{RIGHT}"
    yield f'<path class="beyond" d="{steps}V{TOP}Z"/>'
    yield f'<path class="front" d="{steps}"/>'


def _marks(points: Sequence[Point], best: set[str], places: list[tuple[float, float]]) -> Iterator[str]:
    """The points of the front first, so that they have their names beside them. Those of one place share it."""
    together: dict[tuple[float, float], list[str]] = {}
    for point, (left, top) in sorted(zip(points, places, strict=True), key=lambda pair: pair[0].name not in best):
        together.setdefault((round(left, 1), round(top, 1)), []).append(point.name)
    names = [", ".join(sharing) for sharing in together.values()]
    sizes = [(len(name) * LETTER, LINE) for name in names]
    on_front = [not best.isdisjoint(sharing) for sharing in together.values()]
    beside = [(x, y + LINE * 0.4 * lower) for (x, y), lower in zip(together, on_front, strict=True)]  # below the line
    leftwards = {index for index, good in enumerate(on_front) if good}
    room = LEFT, TOP - LINE, WIDTH, BOTTOM + LINE / 2
    corners = place_labels(beside, sizes, (16, 12), room, leftwards=leftwards)
    for (left, top), name, good, corner in zip(together, names, on_front, corners, strict=True):
        yield f'<circle class="{"best" if good else "rest"}" cx="{left}" cy="{top}" r="5">'
        yield f"<title>{escape(name)}</title></circle>"
        if corner is not None:
            anchor, x = ("end", corner[0] + len(name) * LETTER) if corner[0] < left - 16 else ("start", corner[0])
            yield _text(name, x, corner[1] + 13, "name strong" if good else "name", anchor)


def _text(text: str, x: float, y: float, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
