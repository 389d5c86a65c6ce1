"""Offloading: a schedule in which what forwards save goes to the host and comes back before their backwards; and the
links to a host, on which copies run one at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from math import inf
from typing import NamedTuple

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel, require_cost_model
from pipeflow.core.dataflow import DATAFLOW, Content, Stream, stream_of
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import stages_among
from pipeflow.core.schedule import Schedule, require_schedule, require_unsliced
from pipeflow.core.timeline import Span

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


# Theory of operation
#
# What a forward saved is idle from its end until the first action that uses it: a `Stay`. A copy costs the same however
# long the stay is, so the longest come first; ranks that share a link take turns, so that none is left with nothing. A
# copy to the host is placed as early as the link is free after the forward, a copy back as late as the link is free
# before the use. If the first ends before the second begins, the stay is taken; otherwise it stays on the device.
#
# These times hold for a schedule that runs exactly as simulated. A schedule has an order and no times, so each copy is
# put after the last entry of its row that ends before it. On a shared link the ranks must reach their copies in the
# order in which the link was filled, or one would wait for the link and delay its computations. `HostLink.positions`
# moves copies until the ends of the entries before them are in that order. Copies whose positions then no longer fit
# are left out.


def with_offload(schedule: Schedule, cost: CostModel, stages: Iterable[int] | None = None) -> Schedule:
    """`schedule` with copies to the host (O) of what forwards save, and copies back (L) as late as their backwards
    allow. Ranks that share a link take turns, each with the forwards that wait longest for their backwards. A
    microbatch is offloaded only if both of its copies fit between its forward and its backward, at times when the link
    is free: so copies delay nothing. The result is sound if `schedule` is. PipeOffload (arXiv 2503.01328) also offloads
    what waits longest.

    Args:
        schedule: a schedule with backwards and without offloads.
        cost: the costs, with the time of a copy (`offload`) and the ranks that share a link (`copy_groups`).
        stages: the stages to offload. None: all.

    Raises UsageError for costs without the time of a copy, for a schedule with offloads, and for a stage that does not
    exist.
    """
    require_schedule(schedule)
    require_unsliced(schedule, "offloading")
    require_cost_model(cost)
    among = stages_among(schedule.placement, stages)
    require_copies(cost)
    if any(action.kind is Kind.O for rank in range(len(schedule.rows)) for action in schedule.actions(rank)):
        raise UsageError(f"schedule {schedule.name!r} has offloads already: give the schedule without them")
    timeline = simulate(schedule, cost)
    times = [_times(row, spans) for row, spans in zip(schedule.rows, timeline.rows, strict=True)]
    stays = [_stays(rank, row, at, among) for rank, (row, at) in enumerate(zip(schedule.rows, times, strict=True))]
    ends = [[*accumulate((end for _, end in at), max)] for at in times]
    places = places_in_rows(_filled(stays, cost, ends), ends)
    rows = tuple(
        tuple(each for position, entry in enumerate(row) for each in (entry, *at.get(position, ())))
        for row, at in zip(schedule.rows, places, strict=True)
    )
    return replace(schedule, name=f"{schedule.name} with offload", rows=rows)


def require_copies(cost: CostModel) -> None:
    """Raises UsageError for costs without the time of a copy."""
    if not any(cost.offload):
        raise UsageError(
            "the costs have no time of a copy to the host: give CostModel(offload=) per stage, the bytes that a "
            "forward saves over the bandwidth of the link, or --offload T"
        )


USERS = frozenset(kind for kind, flow in DATAFLOW.items() if (Content.SAVED, 0) in flow.needs)


class Stay(NamedTuple):
    """The time for which a rank keeps what a forward saved: from its end to the start of its first use."""

    start: float
    end: float
    rank: int
    place: tuple[int, int]  # stage and microbatch


def _times(row: Sequence[Entry], spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Per entry of a row, its start and its end; nothing for entries beside the computations, which delay no other."""
    at = {span.action: (span.start, span.end) for span in spans}
    found = []
    for entry in row:
        starts, ends = zip(*(at[action] for action in actions_of(entry)), strict=True)
        found.append((min(starts), max(ends)) if stream_of(entry) is Stream.COMPUTE else (0.0, 0.0))
    return found


def _stays(rank: int, row: Sequence[Entry], times: Iterable[tuple[float, float]], stages: frozenset[int]) -> list[Stay]:
    """The stays of a rank, the longest first."""
    made: dict[tuple[int, int], float] = {}
    found = []
    for entry, (start, end) in zip(row, times, strict=True):
        for action in actions_of(entry):
            place = action.stage, action.microbatch
            if action.kind is Kind.F and action.stage in stages:
                made[place] = end
            elif place in made and action.kind in USERS:
                found.append(Stay(made.pop(place), start, rank, place))
    return sorted(found, key=lambda stay: stay.start - stay.end)


def _filled(stays: Sequence[Sequence[Stay]], cost: CostModel, ends: Sequence[Sequence[float]]) -> list[HostLink]:
    """The links, with the copies that fit on them. Ranks take turns."""
    shared = {rank: group[0] for group in cost.copy_groups for rank in group}
    links: dict[tuple[int, Kind], HostLink] = {}
    for stay in (stay for turn in zip_longest(*stays) for stay in turn if stay is not None):
        owner, (stage, microbatch) = shared.get(stay.rank, stay.rank), stay.place
        out, back = (links.setdefault((owner, kind), HostLink(kind)) for kind in (Kind.O, Kind.L))
        time, back_time = (cost.duration(kind, stage, microbatch) for kind in (Kind.O, Kind.L))
        begin = out.earliest(stay.start, time)
        load = back.latest(stay.end, back_time, begin + time, ends[stay.rank])
        if load > -inf:
            places = (out, begin, time), (back, load, back_time)
            for link, start, taken in places:
                link.add(HostCopy(start, start + taken, stay.rank, Action(link.kind, stage, microbatch), stay.start))
    return list(links.values())
