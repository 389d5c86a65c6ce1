"""What differs between two schedules of one placement, rank by rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from pipeflow.core.action import Action, Entry, Kind, Pair
from pipeflow.core.schedule import Schedule

SHOWN = 4  # of each kind of difference


def moved_lines(first: Schedule, second: Schedule) -> Iterator[str]:
    """Per rank, where the rows first differ, and which actions moved, or are in one of them alone."""
    if first.placement != second.placement:
        yield "The rows are not compared, since the stages are placed differently:"
        yield from (f"{each.name}: {_placed(each)}" for each in (first, second))
        return
    if _splits(first) != _splits(second):
        whole, split = (second, first) if _splits(first) else (first, second)
        yield f"{split.name} has backwards in halves: its I is compared with the B of {whole.name}, its W with nothing."
        first, second = _without_halves(first), _without_halves(second)
    rows = list(zip(first.rows, second.rows, strict=True))
    if all(before == after for before, after in rows):
        yield "The rows are the same on every rank."
        return
    margin = len(f"rank {len(rows) - 1}  ")
    for rank, (before, after) in enumerate(rows):
        lines = _differences(before, after) if before != after else iter(["the same"])
        yield f"rank {rank}".ljust(margin) + next(lines)
        yield from (" " * margin + line for line in lines)


def _placed(schedule: Schedule) -> str:
    paths = schedule.placement.paths
    return "; ".join(f"stages on ranks {' '.join(map(str, path[:16]))}{' ...' * (len(path) > 16)}" for path in paths)


def _splits(schedule: Schedule) -> bool:
    return any(action.kind is Kind.W for rank in range(len(schedule.rows)) for action in schedule.actions(rank))


def _without_halves(schedule: Schedule) -> Schedule:
    """With B for every I, and no W."""

    def whole(action: Action) -> Action:
        return replace(action, kind=Kind.B) if action.kind is Kind.I else action

    def entry(each: Entry) -> Entry:
        return whole(each) if isinstance(each, Action) else Pair(each.forward, whole(each.backward))

    rows = tuple(
        tuple(entry(each) for each in row if not (isinstance(each, Action) and each.kind is Kind.W))
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)


def _differences(before: tuple[Entry, ...], after: tuple[Entry, ...]) -> Iterator[str]:
    position = next(
        (index for index, (one, other) in enumerate(zip(before, after, strict=False)) if one != other),
        min(len(before), len(after)),
    )
    ends = [str(row[position]) if position < len(row) else "its end" for row in (before, after)]
    yield f"position {position}: the first has {ends[0]}, the second {ends[1]}"
    held = set(before), set(after)
    for what, entries in (
        ("moved", _moved(before, after)),
        ("only in the first", [str(entry) for entry in before if entry not in held[1]]),
        ("only in the second", [str(entry) for entry in after if entry not in held[0]]),
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
