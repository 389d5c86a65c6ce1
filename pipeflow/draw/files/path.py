"""Path: the critical path over the lanes of an SVG. Must not contain: the search for the path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipeflow.core.span import Span
from pipeflow.draw.files.lane_frame import Frame


def path_marks(path: Sequence[Span], at: Frame, *, blocks: bool, finest: float) -> Iterator[str]:
    """The marks of the critical path. With `blocks`: a frame around each of its blocks, and a line wherever it changes
    rank. Otherwise: one line along the middle of the lanes, with corners at least `finest` pixels apart.
    """
    if blocks:
        for span in path:
            if (width := at.x(span.end) - at.x(span.start)) > 0:
                y, height = at.y(span.rank, span.stream), at.height(span.stream)
                place = f'x="{at.x(span.start) + 0.25:.2f}" y="{y - 0.75:.2f}" height="{height + 1.5}"'
                yield f'<rect class="critical" {place} width="{max(width - 1.5, 0.5):.2f}" rx="3"/>'
        for before, span in pairwise(path):
            if before.rank != span.rank:
                yield f'<path class="critical" d="{_link(before, span, at)}"/>'
    else:
        yield f'<path class="critical" d="{_line(path, at, finest)}"/>'


def _link(before: Span, span: Span, at: Frame) -> str:
    """A line from the edge of one block to the edge of the next one, on another rank."""
    down = span.rank > before.rank
    y = at.y(before.rank, before.stream) + (at.height(before.stream) if down else 0)
    tip = at.y(span.rank, span.stream) + (0 if down else at.height(span.stream))
    return f"M{at.x(before.end):.2f} {y:g}L{at.x(span.start):.2f} {tip:g}"


def _line(path: Sequence[Span], at: Frame, finest: float) -> str:
    """A line through the middle of the lanes, with at most one corner every `finest` pixels."""
    corners: list[tuple[float, float]] = []
    for span in path:
        y = at.y(span.rank, span.stream) + at.height(span.stream) / 2
        for x in (at.x(span.start), at.x(span.end)):
            if not corners or x - corners[-1][0] >= finest:
                corners.append((x, y))
    return "M" + "L".join(f"{x:.1f} {y:g}" for x, y in corners)
