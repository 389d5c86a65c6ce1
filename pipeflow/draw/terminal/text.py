"""Text: a small simulated timeline as text in a fixed form, for docstrings and messages."""

from __future__ import annotations

from pipeflow.core.timeline import Timeline
from pipeflow.draw.column_pieces import ColumnPiece, pieces, round_half_up, shortest
from pipeflow.draw.lane_rows import lanes, num_chunks
from pipeflow.draw.painters import Letters, paint


def picture(timeline: Timeline) -> str:
    """The timeline as text, one line per rank. The shortest span is as wide as its label and a blank, whatever the
    total width, so this is for small schedules with regular costs. `Gantt` scales to a given width.

    The letter is the kind, the number the microbatch, lower case the second chunk, a dot one unit of idle time:

    >>> from pipeflow import make_schedule, simulate
    >>> print(picture(simulate(make_schedule("1f1b", ranks=2, microbatches=2))))
    rank 0  F0 F1 .  .  B0--- .  B1---
    rank 1  .  F0 B0--- F1 B1--- .  .
    """
    unit = shortest([timeline])
    chunks, drawn = num_chunks(timeline), lanes(timeline)
    found = (piece for rank in pieces(drawn, 1 / unit) for line in rank for piece in line)
    labels = [Letters(chunks).label(piece) for piece in found if isinstance(piece, ColumnPiece)]
    columns = max(map(len, labels), default=0) + 1
    painter = Letters(chunks, grid=columns, joint=" ")
    width = round_half_up(timeline.makespan / unit * columns)
    margin = max(len(lane.name) for rank in drawn for lane in rank) + 2
    return "\n".join(
        lane.name.ljust(margin) + "".join(text for text, _ in paint(line, width, painter, lane.stream)).rstrip()
        for rank, painted in zip(drawn, pieces(drawn, columns / unit), strict=True)
        for lane, line in zip(rank, painted, strict=True)
    )
