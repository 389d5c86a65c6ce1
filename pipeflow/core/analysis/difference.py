"""Difference: what differs between two schedules of one placement, rank by rank. Must not contain: sentences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeflow.core.action import Action, Entry, Kind, Pair, actions_of
from pipeflow.core.schedule import Schedule

Row = tuple[Entry, ...]


class Move(NamedTuple):
    """An entry that is in both rows, at different positions.

    Attributes:
        entry: the entry.
        first, second: its position in the first and in the second row.
    """

    entry: Entry
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two rows.

    Attributes:
        first, second: the rows.
    """

    first: Row
    second: Row

    @property
    def position(self) -> int:
        """The first position at which the rows differ."""
        pairs = enumerate(zip(self.first, self.second, strict=False))
        return next((index for index, (one, other) in pairs if one != other), min(len(self.first), len(self.second)))

    @property
    def moves(self) -> list[Move]:
        """The smallest set of entries that must move to turn the first order into the second."""
        place = {entry: position for position, entry in enumerate(self.second)}
        common = [(entry, position) for position, entry in enumerate(self.first) if entry in place]
        stay = longest_rising([place[entry] for entry, _ in common])
        return [Move(entry, position, place[entry]) for entry, position in common if place[entry] not in stay]

    @property
    def only_first(self) -> list[Entry]:
        """The entries that only the first row has."""
        other = set(self.second)
        return [entry for entry in self.first if entry not in other]

    @property
    def only_second(self) -> list[Entry]:
        """The entries that only the second row has."""
        return Difference(self.second, self.first).only_first


def differences(first: Schedule, second: Schedule) -> list[Difference | None]:
    """Per rank, the difference between its rows; None if they are equal."""
    rows = zip(first.rows, second.rows, strict=True)
    return [None if before == after else Difference(before, after) for before, after in rows]


def moved_actions(first: Schedule, second: Schedule) -> tuple[frozenset[Action], ...] | None:
    """Per rank, the actions of `second` whose position in the row differs from `first`, or that `first` does not have.
    If only one of the schedules splits backwards, its I is compared with the other's B, and W is ignored. None if the
    stages are placed differently, so that the rows cannot be compared.
    """
    if first.placement != second.placement:
        return None
    halves = has_halves(second) and not has_halves(first)
    if has_halves(first) != has_halves(second):
        first, second = without_halves(first), without_halves(second)

    def moved(found: Difference) -> Iterator[Action]:
        for entry in (*(move.entry for move in found.moves), *found.only_second):
            for action in actions_of(entry):
                yield replace(action, kind=Kind.I) if halves and action.kind is Kind.B else action

    return tuple(frozenset(moved(found)) if found else frozenset() for found in differences(first, second))


def has_halves(schedule: Schedule) -> bool:
    """Whether the schedule splits backwards, so that some weight gradients have an action of their own."""
    return Kind.W in schedule.kinds


def without_halves(schedule: Schedule) -> Schedule:
    """The schedule with B for every I, and without W, to be compared with a schedule of whole backwards."""

    def whole(action: Action) -> Action:
        return replace(action, kind=Kind.B) if action.kind is Kind.I else action

    def entry(each: Entry) -> Entry:
        return whole(each) if isinstance(each, Action) else Pair(each.forward, whole(each.backward))

    rows = tuple(
        tuple(entry(each) for each in row if not (isinstance(each, Action) and each.kind is Kind.W))
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)


def longest_rising(numbers: list[int]) -> set[int]:
    """The longest rising subsequence of distinct numbers, by patience sorting."""
    tails: list[int] = []  # per length, the smallest last number of a rising subsequence of this length
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
