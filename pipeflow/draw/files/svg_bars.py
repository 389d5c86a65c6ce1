"""bars_svg: stacked bars as an SVG document, such as the parts of steps below each other. Must not contain: what is
stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pipeflow.core.text import percent
from pipeflow.draw.files.svg_scatter import STYLE
from pipeflow.draw.markup import escaped

WIDTH, MARGIN = 720, 24
TOP, BAR, EACH = 60, 28, 62  # pixels: where the first bar starts, its height, and from one to the next
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
    scale = (WIDTH - 2 * MARGIN) / longest
    shown = [name for name in names if any(name in bar.parts for bar in bars)]
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    legend = TOP + EACH * len(bars) + 8
    height = legend + ROW * (len(shown) + (len(bars) > 1)) + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            f' role="img" aria-label="{escaped(title)}">',
            f"<style>{STYLE}\n.block {{ stroke: none }}\ntext.on {{ fill: #10141c; font-size: 12px }}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
            _text(title, MARGIN, 28, "title"),
            *(
                line
                for place, bar in enumerate(bars)
                for line in _bar(bar, TOP + EACH * place, shown, colours, scale, text)
            ),
            *_legend(bars, shown, colours, legend, text),
            "</svg>\n",
        ]
    )


def _bar(
    bar: Bar, top: float, names: list[str], colours: dict[str, str], scale: float, text: Callable[[float], str]
) -> Iterator[str]:
    """The name of a bar with its sum, and its blocks from the left."""
    whole, left = sum(bar.parts.values()), float(MARGIN)
    yield _text(bar.name, MARGIN, top + 8, "strong")
    yield _text(text(whole), WIDTH - MARGIN, top + 8, "strong", "end")
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
    room = (WIDTH - 2 * MARGIN - 150) // CELL
    columns = [(bar, MARGIN + 150 + CELL * (place + 1)) for place, bar in enumerate(bars[:room])]
    if len(bars) > 1:
        for number, (_, x) in enumerate(columns, start=1):
            yield _text(str(number), x, top + 12, "quiet", "end")
        top += ROW
    for place, name in enumerate(names):
        y = top + ROW * place
        yield f'<rect x="{MARGIN}" y="{y + 2}" width="{SWATCH}" height="{SWATCH}" fill="{colours[name]}"/>'
        yield _text(name, MARGIN + SWATCH + 8, y + 12, "name")
        for bar, x in columns:
            yield _text(text(bar.parts[name]) if name in bar.parts else "-", x, y + 12, "quiet", "end")


def _text(text: str, x: float, y: float, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'
