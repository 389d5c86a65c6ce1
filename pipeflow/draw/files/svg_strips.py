"""Strips: the lanes of an SVG whose spans are too narrow to be blocks, as columns in their average colour. Must not
contain: the places of lanes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeflow.draw.colours import average, css, shade
from pipeflow.draw.column_pieces import Line, Mixture

STEPS = 32  # steps of each colour component, so that columns that look alike share a path


class Paint(NamedTuple):
    """A colour as CSS writes it, and its opacity."""

    colour: str
    opacity: float


def strips(line: Line, chunks: int, start: str, height: float, finest: float) -> Iterator[str]:
    """One path per colour, from the point that `start` moves to, with columns `finest` pixels wide. Idle time is
    transparent, so that a strip looks right on a light and on a dark ground.
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
    """Columns as a line with gaps. Adjacent columns are one dash."""
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
