"""Spilling: an order within the room of each rank. What some forwards saved is copied to the host and back, or computed
again. Must not contain: the search for orders.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Literal, NamedTuple, get_args

from pipeflow.core.action import Action, Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError, names_of
from pipeflow.core.liveness import MemoryCap, cap_per_rank
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.orders.list_scheduling import RunTimes, run_times
from pipeflow.schedules.orders.offloading import HostCopy, HostLink, places_in_rows, require_copies
from pipeflow.schedules.orders.problem import HALVES, ROUNDING, Objective, Operations, Problem, make_problem, numbered

MemoryKind = Literal["offload", "recompute"]
"""A way to save memory that a search may use: copies to the host and back, or forwards that are computed again."""

Place = tuple[int, int]  # stage and microbatch


class StageNeeds(NamedTuple):
    """What a microbatch takes on a stage: the amounts that its rank keeps from a forward on, between the halves of a
    backward, and from a forward on that is computed again; and the times to compute a forward again, and of the copies
    to the host and back.
    """

    saved: float
    deferred: float
    inputs: float
    again: float
    out: float
    back: float


@dataclass(frozen=True, slots=True)
class Storage:
    """What a rank keeps, in the unit of `Problem.memory`, and what it takes to keep it elsewhere.

    Attributes:
        problem: the problem without a cap.
        room: per rank, the most that it may keep.
        stage_needs: per stage, those of a microbatch of factor 1.
        links: the ranks of each link to a host.
        offloads, recomputes: whether a search may use copies, and recomputation.
    """

    problem: Problem
    room: tuple[float, ...]
    stage_needs: tuple[StageNeeds, ...]
    links: tuple[tuple[int, ...], ...]
    offloads: bool
    recomputes: bool

    def needs(self, place: Place) -> StageNeeds:
        """What one microbatch takes on a stage."""
        found, factors = self.stage_needs[place[0]], self.problem.factors
        return StageNeeds(*(factors[place[0]][place[1]] * each for each in found)) if factors else found

    @property
    def capped(self) -> Problem:
        """The problem with the room of each rank, even where it is too small without copies or recomputation."""
        return replace(self.problem, memory=replace(self.problem.memory, room=self.room))

    @property
    def holds_microbatches(self) -> bool:
        """Whether every rank has room for one microbatch on all of its stages, without copies or recomputation."""
        return all(need <= most for need, most in zip(self.problem.least, self.room, strict=True))


def make_storage(
    placement: Placement,
    microbatches: int,
    cost: CostModel,
    kinds: Collection[str],
    memory_cap: MemoryCap | None = None,
    bytes_cap: MemoryCap | None = None,
    objective: Objective = "makespan",
) -> Storage:
    """The storage of a search that may use these kinds. Raises UsageError as `make_problem` does, except for a small
    cap. Also raises it for unknown kinds, for offload if the costs have no time of a copy, and for a placement of
    several paths.
    """
    kinds = names_of("kinds", kinds)
    if unknown := sorted({*kinds} - {*get_args(MemoryKind)}):
        raise UsageError(f"a search knows the kinds {' and '.join(get_args(MemoryKind))}, not {unknown[0]!r}")
    if "offload" in kinds:
        require_copies(cost)
    if len(placement.paths) > 1:
        raise UsageError(f"a search with kinds takes placements of one path; this one has {len(placement.paths)}")
    if memory_cap is not None and bytes_cap is not None:
        make_problem(placement, microbatches, cost, memory_cap, bytes_cap, objective)  # raises
    in_bytes = bytes_cap is not None
    problem = make_problem(placement, microbatches, cost, None, inf if in_bytes else None, objective)
    memory, none = problem.memory, (0.0,) * placement.num_stages
    inputs = cost.sizes.get(Content.INPUT, none) if in_bytes else none
    deferred = [-end for end in memory.at_end[2::3]]
    times = (cost.durations[kind] for kind in (Kind.C, Kind.O, Kind.L))
    return Storage(
        problem,
        _room(problem, memory_cap, bytes_cap),
        tuple(map(StageNeeds, memory.at_start[::3], deferred, inputs, *times)),
        links=_links(placement.num_ranks, cost.copy_groups),
        offloads="offload" in kinds,
        recomputes="recompute" in kinds,
    )


def _room(problem: Problem, memory_cap: MemoryCap | None, bytes_cap: MemoryCap | None) -> tuple[float, ...]:
    name, cap = ("memory_cap", memory_cap) if bytes_cap is None else ("bytes_cap", bytes_cap)
    if cap is None:
        return problem.memory.room
    least = [min(problem.memory.at_start[3 * stage] for stage in own) for own in problem.stages]
    unit = problem.memory.unit or 1
    return tuple(most * unit * (1 + ROUNDING) for most in cap_per_rank(cap, [each / unit for each in least], name))


def _links(ranks: int, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The groups, and every rank in none of them alone."""
    shared = {rank for group in groups for rank in group}
    return (*map(tuple, groups), *((rank,) for rank in range(ranks) if rank not in shared))


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
        end, lengths = 0.0, storage.problem.times(sequences[rank])
        for (operation, microbatch), start, length in zip(
            numbered(sequences[rank]), times.starts[rank], lengths, strict=True
        ):
            place, half = (operation // 3, microbatch), operation % 3
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
        saved, deferred, inputs, takes, *_ = self.storage.needs(value.place)
        if again is None:
            self._change(value.start, value.rank, saved, value)
        else:
            self._change(value.start, value.rank, inputs)
            self._change(again, value.rank, saved)
            self._change(again + takes, value.rank, -inputs)
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
        saved, *_, out, back = self.storage.needs(value.place)
        start = self.out.earliest(value.made, out, time)
        if start == inf:
            return False
        load = self.back.latest(value.use, back, time, self._ends[value.rank])
        if load <= time * (1 + ROUNDING):
            return False
        self.out.add(HostCopy(start, start + out, value.rank, Action(Kind.O, *value.place), value.made))
        self.back.add(HostCopy(load, load + back, value.rank, Action(Kind.L, *value.place), value.made))
        self._later(load, value, saved)
        return True

    def _dropped(self, value: SavedValue, time: float) -> bool:
        """Lets a value be computed again, directly before its use."""
        saved, _, inputs, again, *_ = self.storage.needs(value.place)
        self.dropped.append(value)
        self._later(max(time, value.use - again), value, saved - inputs)
        return True


class Spilled(NamedTuple):
    """An order within its room.

    Attributes:
        objective, other: its measures, as those of `ScoredOrder`, with recomputations.
        sequences: per rank, its sequence of operations.
        times: when they run.
        again: the (stage, microbatch) that are computed again, with the time of that.
        copies: per rank and position of its row with recomputations, the copies that come after this entry.
    """

    objective: float
    other: float
    sequences: list[Operations]
    times: RunTimes
    again: Mapping[Place, float]
    copies: list[dict[int, list[Action]]]


def spilled(
    storage: Storage, sequences: Sequence[Operations], again: Mapping[Place, float], stop: float = inf
) -> Spilled | None:
    """The order of `sequences` in which at least `again` are computed again. None if it cannot run, if its objective
    is found to be more than `stop`, or if it does not keep within the room.
    """
    again = dict(again)
    while True:
        times = run_times(storage.problem, sequences, again)
        if times is None or (scored := times.candidate(storage.problem, sequences)).objective > stop:
            return None
        rows = [RankRow.of(storage, rank, sequences, times, again) for rank in range(len(sequences))]
        links = [LinkSpill(storage, [rows[rank] for rank in ranks]) for ranks in storage.links]
        if not all(link.spill() for link in links):
            return None
        more = {value.place: storage.needs(value.place).again for link in links for value in link.dropped}
        if not more:
            directions = (direction for link in links for direction in (link.out, link.back))
            return Spilled(*scored[:3], times, again, places_in_rows(directions, [row.ends for row in rows]))
        again |= more


def to_spilled_schedule(name: str, storage: Storage, found: Spilled) -> Schedule:
    """The schedule of an order, with its recomputations and copies."""
    problem = storage.problem
    rows: list[tuple[Action, ...]] = []
    for sequence, copies in zip(found.sequences, found.copies, strict=True):
        row: list[Action] = []
        entries = count()
        for operation, microbatch in numbered(sequence):
            place = operation // 3, microbatch
            kinds = (Kind.C, Kind.I) if operation % 3 == 1 and place in found.again else (HALVES[operation % 3],)
            for kind in kinds:
                row += Action(kind, *place), *copies.get(next(entries), ())
        rows.append(tuple(row))
    return Schedule(name, problem.placement, problem.num_microbatches, tuple(rows))
