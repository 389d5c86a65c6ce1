"""The differences between two schedules, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.analysis.difference import Difference, differences, has_halves, without_halves
from pipeflow.core.schedule import Schedule

SHOWN = 4  # how many entries of each kind of difference are written out


def difference_lines(first: Schedule, second: Schedule) -> Iterator[str]:
    """Per rank, the first position at which the rows differ, the actions that moved, and the actions that only one row
    has.
    """
    if first.placement != second.placement:
        yield "The stages are placed differently, so the rows are not compared:"
        yield from (f"{each.name}: {_placed(each)}" for each in (first, second))
        return
    if has_halves(first) != has_halves(second):
        whole, split = (second, first) if has_halves(first) else (first, second)
        yield f"{split.name} splits backwards into I and W: I is matched with the B of {whole.name}, W is ignored."
        first, second = without_halves(first), without_halves(second)
    found = differences(first, second)
    if not any(found):
        yield "Both run the same order on every rank."
        return
    margin = len(f"rank {len(found) - 1}  ")
    for rank, difference in enumerate(found):
        lines = _lines(difference) if difference else iter(["the same"])
        yield f"rank {rank}".ljust(margin) + next(lines)
        yield from (" " * margin + line for line in lines)


def _placed(schedule: Schedule) -> str:
    paths = schedule.placement.paths
    return "; ".join(f"stages on ranks {' '.join(map(str, path[:16]))}{' ...' * (len(path) > 16)}" for path in paths)


def _lines(found: Difference) -> Iterator[str]:
    rows, position = (found.first, found.second), found.position
    ends = [str(row[position]) if position < len(row) else "nothing" for row in rows]
    yield f"position {position}: the first has {ends[0]}, the second {ends[1]}"
    for what, entries in (
        ("moved", [f"{entry} {first} to {second}" for entry, first, second in found.moves]),
        ("only in the first", list(map(str, found.only_first))),
        ("only in the second", list(map(str, found.only_second))),
    ):
        if entries:
            more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
            yield f"{what}: {', '.join(entries[:SHOWN])}{more}"
