"""Tables: the measures of timelines and of their ranks, as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from pipeflow.core.span import Row
from pipeflow.core.text import percent
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import heading
from pipeflow.draw.lane_rows import Lane, all_lanes
from pipeflow.draw.markup import escaped
from pipeflow.draw.memory import amount_text, peaks, unit_of
from pipeflow.draw.times import Unit


def measures_table(timelines: tuple[Timeline, ...], unit: Unit) -> str:
    """A table with one line per timeline."""
    rows = [
        (
            heading(timeline),
            unit.text(timeline.makespan),
            unit.text(timeline.span),
            unit.text(timeline.work),
            percent(timeline.makespan_bubble_ratio),
            percent(timeline.bubble_ratio),
            f"{amount_text(timeline, max(peaks(timeline)))}{'' if timeline.saved_bytes else ' activations'}",
        )
        for timeline in timelines
    ]
    head = ("timeline", "makespan", "span", "work of the busiest rank", "bubble", "bubble of span", "peak")
    return table("Measures", head, rows)


def ranks_table(timeline: Timeline, unit: Unit) -> str:
    """A table with one line per rank: when it computes, when its other streams end, and its peak."""
    drawn, most = all_lanes(timeline), peaks(timeline)
    rows = [
        (lanes[0].name, *_computing(lanes[0].row, unit), *_ends(lanes[1:], unit), amount_text(timeline, peak))
        for lanes, peak in zip(drawn, most, strict=True)
    ]
    beside = [f"last end of {lane.name}" for lane in drawn[0][1:]]
    head = ("rank", "actions", "first start", "last end", "busy", "idle between", *beside, f"peak {unit_of(timeline)}")
    ranks = table(heading(timeline), head, rows)
    return f'<details class="ranks"><summary>Ranks of {escaped(heading(timeline))}</summary>{ranks}</details>'


def _computing(row: Row, unit: Unit) -> list[str]:
    """The number of computations, the start of the first, the end of the last, their total time, and the idle time
    between them.
    """
    first, last = (row[0].start, row[-1].end) if row else (0.0, 0.0)
    busy = sum(span.end - span.start for span in row)
    return [str(len(row)), *map(unit.text, (first, last, busy, last - first - busy))]


def _ends(lanes: Sequence[Lane], unit: Unit) -> list[str]:
    return [unit.text(max((span.end for span in lane.row), default=0.0)) for lane in lanes]


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a caption, the titles of its columns, and its lines; the first cell of each line is its title."""
    titles = "".join(f'<th scope="col">{escaped(title)}</th>' for title in head)
    lines = "".join(
        f'<tr><th scope="row">{escaped(first)}</th>{"".join(f"<td>{escaped(cell)}</td>" for cell in rest)}</tr>\n'
        for first, *rest in rows
    )
    return (
        f'<div class="tables"><table><caption><span>{escaped(caption)}</span></caption>'
        f"<thead><tr>{titles}</tr></thead>\n<tbody>\n{lines}</tbody></table></div>\n"
    )
