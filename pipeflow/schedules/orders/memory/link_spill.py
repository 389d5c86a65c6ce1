"""Spilling on one link: which values of the ranks that share a link to their host leave them, and when. Must not
contain: the search for orders, and when they run.

Time goes forward. When a rank keeps too much, the value leaves whose use is farthest away (L. A. Belady, A study of
replacement algorithms for a virtual-storage computer, 1966). It is copied to the host if the link has time for both
copies, so that they delay nothing; else it is to be computed again.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.schedules.orders.memory.host_links import ROUNDING, HostCopy, HostLink
from pipeflow.schedules.orders.memory.storage import Place, Storage
from pipeflow.schedules.orders.neighbours import RunTimes
from pipeflow.schedules.orders.problem import Operations


@dataclass(slots=True, eq=False)
class SavedValue:
    """What a forward saves. Its forward starts at `start` and ends at `made`, the first half of its backward starts at
    `use` and ends at `halved`, and the second ends at `gone`. `leaves`: whether it is kept elsewhere meanwhile.
    """

    rank: int
    place: Place
    start: float
    made: float
    use: float = inf
    halved: float = inf
    gone: float = inf
    leaves: bool = False


class RankRow(NamedTuple):
    """A rank's values, when its recomputations start, and when the entries of its row end, with recomputations."""

    rank: int
    values: dict[Place, SavedValue]
    again: dict[Place, float]
    ends: list[float]

    @classmethod
    def of(
        cls,
        storage: Storage,
        rank: int,
        sequences: Sequence[Operations],
        times: RunTimes,
        again: Mapping[Place, float],
    ) -> RankRow:
        """The row of a rank that runs at these times; `again` has the times of the recomputations."""
        row = cls(rank, {}, {}, [])
        done, end = Counter[int](), 0.0
        lengths = storage.problem.times(sequences[rank])
        for operation, start, length in zip(sequences[rank], times.starts[rank], lengths, strict=True):
            place, half = (operation // 3, done[operation]), operation % 3
            done[operation] += 1
            if half == 1 and place in again:
                row.again[place] = end
                row.ends.append(end + again[place])
            end = start + length
            row.ends.append(end)
            if half == 0:
                row.values[place] = SavedValue(rank, place, start, end)
            elif half == 1:
                row.values[place].use, row.values[place].halved = start, end
            else:
                row.values[place].gone = end
        return row


class _Change(NamedTuple):
    """A change of what a rank keeps. Among those at the same time, those by which it keeps more come last. `value` is
    kept from then on, and may leave.
    """

    time: float
    more: bool
    number: int
    rank: int
    amount: float
    value: SavedValue | None = None


@dataclass(slots=True)
class LinkSpill:
    """A link to a host, and what leaves the ranks that share it. Both of its directions have their copies then, and
    `dropped` the values that must be computed again.

    Args:
        storage: the room of each rank.
        rows: those of the ranks.
    """

    storage: Storage
    rows: Sequence[RankRow]
    out: HostLink = field(default_factory=lambda: HostLink(Kind.O))
    back: HostLink = field(default_factory=lambda: HostLink(Kind.L))
    dropped: list[SavedValue] = field(default_factory=list)
    _ends: dict[int, list[float]] = field(default_factory=dict)
    _kept: dict[int, float] = field(default_factory=dict)
    _present: dict[int, list[tuple[float, Place, SavedValue]]] = field(default_factory=dict)
    _changes: list[_Change] = field(default_factory=list)

    def spill(self) -> bool:
        """Chooses what leaves; whether all ranks then keep within their room."""
        for row in self.rows:
            self._ends[row.rank], self._kept[row.rank], self._present[row.rank] = row.ends, 0.0, []
            for value in row.values.values():
                self._add(value, row.again.get(value.place))
        heapify(self._changes)
        while self._changes:
            time, more, _, rank, amount, kept = heappop(self._changes)
            self._kept[rank] += amount
            if kept is not None:
                insort(self._present[rank], (kept.use, kept.place, kept))
            while more and self._kept[rank] > self.storage.room[rank]:
                if not self._relieved(rank, time):
                    return False
        return True

    def _add(self, value: SavedValue, again: float | None) -> None:
        saved, deferred, inputs = self.storage.kept(value.place)
        if again is None:
            self._change(value.start, value.rank, saved, value)
        else:
            self._change(value.start, value.rank, inputs)
            self._change(again, value.rank, saved)
            self._change(again + self.storage.times(value.place).again, value.rank, -inputs)
        self._change(value.halved, value.rank, deferred - saved)
        self._change(value.gone, value.rank, -deferred)

    def _change(self, time: float, rank: int, amount: float, value: SavedValue | None = None) -> None:
        if amount or value:
            self._changes.append(_Change(time, amount > 0, len(self._changes), rank, amount, value))

    def _later(self, time: float, value: SavedValue, amount: float) -> None:
        """`value` is away now, and comes back at a time."""
        value.leaves = True
        self._kept[value.rank] -= amount
        heappush(self._changes, _Change(time, True, -len(self.out.copies) - len(self.dropped), value.rank, amount))

    def _relieved(self, rank: int, time: float) -> bool:
        """Lets one value leave that is used after `time`; whether there is one."""
        offloads, recomputes = self.storage.offloads, self.storage.recomputes
        return (offloads and any(self._copied(value, time) for value in self._leaving(rank, time))) or (
            recomputes and any(self._dropped(value, time) for value in self._leaving(rank, time))
        )

    def _leaving(self, rank: int, time: float) -> Iterator[SavedValue]:
        """The values that may leave, those first that are used last."""
        for use, _, value in reversed(self._present[rank]):
            if use <= time:
                return
            if not value.leaves:
                yield value

    def _copied(self, value: SavedValue, time: float) -> bool:
        """Copies a value out before `time` and back after it, if the link is free for both."""
        _, out, back = self.storage.times(value.place)
        start = self.out.earliest(value.made, out, time)
        if start == inf:
            return False
        load = self.back.latest(value.use, back, time, self._ends[value.rank])
        if load <= time * (1 + ROUNDING):
            return False
        self.out.add(HostCopy(start, start + out, value.rank, Action(Kind.O, *value.place), value.made))
        self.back.add(HostCopy(load, load + back, value.rank, Action(Kind.L, *value.place), value.made))
        self._later(load, value, self.storage.kept(value.place).saved)
        return True

    def _dropped(self, value: SavedValue, time: float) -> bool:
        """Lets a value be computed again, directly before its use."""
        saved, _, inputs = self.storage.kept(value.place)
        self.dropped.append(value)
        self._later(max(time, value.use - self.storage.times(value.place).again), value, saved - inputs)
        return True
