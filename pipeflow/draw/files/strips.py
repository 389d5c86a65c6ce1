"""Strips: a lane of an SVG whose spans are too narrow to be blocks, as the average colours of its columns. What must
not live here: where lanes lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeflow.draw.colours import average, css, shade
from pipeflow.draw.pieces import Line, Mixture

STEPS = 32  # in which colours are told apart, so that columns that look alike are one path


class Paint(NamedTuple):
    """A colour as CSS writes it, and how much of the ground it covers."""

    colour: str
    opacity: float


def strips(line: Line, chunks: int, start: str, height: float, finest: float) -> Iterator[str]:
    """A path for each colour, from the point that `start` moves to; columns are `finest` pixels wide. What is idle lets
    the ground through, so that a strip is right on light and on dark ones.
    """
    columns: defaultdict[Paint, list[tuple[int, int]]] = defaultdict(list)
    for piece in line:
        if isinstance(piece, Mixture):
            columns[_mixed(piece, chunks)].append((piece.first, piece.end))
        else:
            columns[Paint(shade(piece.kind, piece.chunk, chunks), 1.0)].append((piece.first, piece.end))
    for (colour, opacity), ends in sorted(columns.items()):
        covers = "" if opacity == 1 else f' stroke-opacity="{opacity:.3g}"'
        look = f'class="blocks" stroke-width="{height}" stroke="{colour}"{covers}'
        yield f'<path {look} d="{start}{_dashes(ends, finest)}"/>'


def _mixed(mixture: Mixture, chunks: int) -> Paint:
    (red, green, blue), busy = average(mixture.shares, chunks)
    red, green, blue = (round(part / 255 * STEPS) * 255 / STEPS for part in (red, green, blue))
    return Paint(css((red, green, blue)), round(busy * STEPS) / STEPS)


def _dashes(columns: Iterable[tuple[int, int]], finest: float) -> str:
    """Columns as a line with gaps; those that touch are one dash."""
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
