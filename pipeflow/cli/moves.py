"""What differs between two schedules of one placement, rank by rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from pipeflow.core.action import Entry
from pipeflow.core.schedule import Schedule

SHOWN = 4  # of each kind of difference


def moved_lines(first: Schedule, second: Schedule) -> Iterator[str]:
    """Per rank a line: where the rows first differ, and which actions moved, or are in one of them alone."""
    if first.placement != second.placement:
        sizes = [f"{each.placement.num_stages} stages on {each.placement.num_ranks} ranks" for each in (first, second)]
        where = ": " + " and ".join(sizes) if sizes[0] != sizes[1] else ""
        yield f"The rows are not compared, since the stages are placed differently{where}."
        return
    same = [rank for rank, rows in enumerate(zip(first.rows, second.rows, strict=True)) if rows[0] == rows[1]]
    if len(same) == len(first.rows):
        yield "The rows are the same on every rank."
        return
    for rank, (before, after) in enumerate(zip(first.rows, second.rows, strict=True)):
        label = f"rank {rank}".ljust(len(f"rank {len(first.rows) - 1}  "))
        yield label + ("the same" if rank in same else "; ".join(_differences(before, after)))


def _differences(before: tuple[Entry, ...], after: tuple[Entry, ...]) -> Iterator[str]:
    position = next(
        (index for index, (one, other) in enumerate(zip(before, after, strict=False)) if one != other),
        min(len(before), len(after)),
    )
    ends = [str(row[position]) if position < len(row) else "the end" for row in (before, after)]
    yield f"from position {position}: {ends[0]}, then {ends[1]}"
    for what, entries in (
        ("moved", _moved(before, after)),
        ("only first", [str(entry) for entry in before if entry not in set(after)]),
        ("only second", [str(entry) for entry in after if entry not in set(before)]),
    ):
        if entries:
            more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
            yield f"{what}: {', '.join(entries[:SHOWN])}{more}"


def _moved(before: tuple[Entry, ...], after: tuple[Entry, ...]) -> list[str]:
    """The fewest entries that must move to turn the one order into the other, with their positions in both."""
    place = {entry: position for position, entry in enumerate(after)}
    common = [entry for entry in before if entry in place]
    stay = _longest_rising([place[entry] for entry in common])
    start = {entry: position for position, entry in enumerate(before)}
    return [f"{entry} {start[entry]} to {place[entry]}" for entry in common if place[entry] not in stay]


def _longest_rising(numbers: list[int]) -> set[int]:
    """The longest subsequence that rises, by patience sorting."""
    tails: list[int] = []  # per length, the least last number of a rising subsequence of that length
    before: dict[int, int | None] = {}
    for number in numbers:
        length = bisect_left(tails, number)
        before[number] = tails[length - 1] if length else None
        tails[length : length + 1] = [number]
    found: set[int] = set()
    last = tails[-1] if tails else None
    while last is not None:
        found.add(last)
        last = before[last]
    return found
