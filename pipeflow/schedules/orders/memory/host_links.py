"""Links to a host: when copies run on them, and where in their rows ranks begin them. Must not contain: which values
are copied.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from pipeflow.core.action import Action, Kind

ROUNDING = 1e-9  # by which times that are equal may differ


class HostCopy(NamedTuple):
    """A copy with its time on its link."""

    start: float
    end: float
    rank: int
    action: Action
    made: float  # when its forward has ended


class HostLink:
    """One direction of a link to a host, with its copies in the order of their starts. It carries one at a time.

    Args:
        kind: O or L, the kind of its copies.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.copies: list[HostCopy] = []
        self._starts: list[float] = []
        self._ends: list[float] = []

    def add(self, copy: HostCopy) -> None:
        """Adds a copy at a time at which the link is free."""
        place = bisect_left(self._starts, copy.start)
        self.copies.insert(place, copy)
        self._starts.insert(place, copy.start)
        self._ends.insert(place, copy.end)

    def earliest(self, start: float, time: float, until: float = inf) -> float:
        """The first start, from `start` on, of a copy that ends by `until`; inf if there is none."""
        place = bisect_right(self._ends, start)
        while place < len(self._starts) and start + time > self._starts[place] * (1 + ROUNDING):
            start = max(start, self._ends[place])
            place += 1
            if start + time > until * (1 + ROUNDING):
                return inf
        return start if start + time <= until * (1 + ROUNDING) else inf

    def latest(self, until: float, time: float, start: float, ends: Sequence[float]) -> float:
        """The last start, from `start` on, of a copy that ends by `until`; -inf if there is none. Its rank begins it
        where an entry of its row ends, at one of `ends`, or if the link is not free then, when it is.
        """
        place = bisect_left(self._starts, until)
        close = until
        while close - time >= start * (1 - ROUNDING):
            begin = self._ends[place - 1] if place else 0.0
            latest = min(close, until) - time
            if latest >= begin * (1 - ROUNDING):
                found = max(ends[_last(ends, latest)], begin)
                return found if found >= start else -inf
            if not place:
                break
            place -= 1
            close = self._starts[place]
        return -inf

    def positions(self, ends: Sequence[Sequence[float]]) -> Iterator[tuple[HostCopy, int]]:
        """Each copy with the position in its row that it comes after, for the times at which entries end. Ranks that
        share the link use it in the order in which they reach their copies. So they reach them in the order of their
        starts: to load, some ranks reach them earlier than they need to, and to offload, later than they could.
        """
        if self.kind is Kind.L:
            limit, rank = inf, -1
            for copy in reversed(self.copies):
                before = limit if copy.rank == rank else limit * (1 - 3 * ROUNDING)
                position = _last(ends[copy.rank], min(copy.start, before))
                limit, rank = ends[copy.rank][position], copy.rank
                yield copy, position
        else:
            limit, rank = 0.0, -1
            for copy in self.copies:
                after = limit if copy.rank == rank else limit * (1 + 3 * ROUNDING)
                latest = _last(ends[copy.rank], copy.start)
                position = min(latest, bisect_left(ends[copy.rank], max(after, copy.made) * (1 - ROUNDING)))
                limit, rank = ends[copy.rank][position], copy.rank
                yield copy, position


def _last(ends: Sequence[float], time: float) -> int:
    """The position of the last entry that has ended at a time."""
    return max(bisect_right(ends, time * (1 + ROUNDING)) - 1, 0)


def places_in_rows(links: Iterable[HostLink], ends: Sequence[Sequence[float]]) -> list[dict[int, list[Action]]]:
    """Per rank and position of its row, the copies that come after this entry. Copies out that would come after their
    copies back are left out, and these too.
    """
    placed = [each for link in links for each in link.positions(ends)]
    position_of = {copy.action: position for copy, position in placed}
    places: list[dict[int, list[Action]]] = [{} for _ in ends]
    for copy, position in sorted(placed, key=lambda each: each[0].start):
        out, back = (Action(kind, copy.action.stage, copy.action.microbatch) for kind in (Kind.O, Kind.L))
        if position_of[out] <= position_of[back]:
            places[copy.rank].setdefault(position, []).append(copy.action)
    return places
