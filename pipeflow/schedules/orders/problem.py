"""Problem: what a search for an order starts from, flattened into numbers; and how rows become schedules.

A row is a sequence of operations: operation `3 * stage + half` is the next F (half 0), I (1) or W (2) of a stage.
Every operation takes the microbatches in one order, so the sequence alone determines the row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from statistics import fmean
from typing import Literal, get_args

from pipeflow.core.action import Action, Kind
from pipeflow.core.cost import CostModel, require_cost_model
from pipeflow.core.dataflow import DATAFLOW, Content, sources
from pipeflow.core.errors import UsageError
from pipeflow.core.factors import Row, require_factors
from pipeflow.core.liveness import CHANGES, MemoryCap, cap_per_rank
from pipeflow.core.placement import Placement, require_placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline

Objective = Literal["makespan", "span"]
HALVES = (Kind.F, Kind.I, Kind.W)
PARTS = {  # what a kind of action is made of; nothing, if a search leaves it out
    kind: [half for half, part in enumerate(HALVES) if part in (flow.takes or (kind,)) and not flow.needs_only]
    for kind, flow in DATAFLOW.items()
}
ROUNDING = 1e-9  # by which a cap of, say, 2/3 of a share of 3 chunks may miss a whole number
Operations = list[int]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a rank keeps, in activations of one chunk or in bytes.

    Per operation, `at_start` is the amount that it adds when it begins, and `at_end` what it adds, mostly a negative
    number, when it ends. `room` has the most that each rank may keep. `spare` has per rank what the I of one
    microbatch, of the largest one, may add: forwards leave that much room, so that a backward can always run. All other
    amounts are those of factor 1. `unit`: how many activations of a chunk `Timeline.peak_activations` counts as one;
    None where the amounts are bytes.
    """

    at_start: tuple[float, ...]
    at_end: tuple[float, ...]
    room: tuple[float, ...]
    spare: tuple[float, ...]
    unit: float | None


@dataclass(frozen=True, slots=True)
class Problem:
    """The data of a search. Per operation, `durations` is its time, `source` the operation whose value it waits for (-1
    for none), and `delays` the time of the transfer of that value. `stages` has per rank its stages in ascending order.
    `objective` is what the search makes small. `factors` are those of the microbatches per stage, if they differ, in
    the `order` in which all operations take them; an empty order is that of their numbers.
    """

    placement: Placement
    num_microbatches: int
    ranks: tuple[int, ...]  # per stage
    stages: tuple[tuple[int, ...], ...]  # per rank
    durations: tuple[float, ...]
    source: tuple[int, ...]
    delays: tuple[float, ...]
    memory: MemoryUse
    objective: Objective
    factors: tuple[Row, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def work(self) -> tuple[float, ...]:
        """The busy time of each rank."""
        whole = [*map(sum, self.factors)] or [self.num_microbatches] * len(self.ranks)
        return tuple(
            sum(whole[stage] * sum(self.durations[3 * stage : 3 * stage + 3]) for stage in stages)
            for stages in self.stages
        )

    def each(self, amounts: Sequence[float]) -> list[Sequence[float]]:
        """Per operation and microbatch, its part of amounts that are per operation at factor 1."""
        if not self.factors:
            return [(amount,) * self.num_microbatches for amount in amounts]
        return [[amount * factor for factor in self.factors[index // 3]] for index, amount in enumerate(amounts)]

    def times(self, sequence: Operations) -> list[float]:
        """The time of each operation of a sequence."""
        if not self.factors:
            return [self.durations[operation] for operation in sequence]
        durations, factors = self.durations, self.factors
        return [durations[operation] * factors[operation // 3][place] for operation, place in numbered(sequence)]

    def alike(self) -> Problem:
        """The problem in which all microbatches have the mean factor of each stage."""
        if not self.factors:
            return self
        means, memory = [fmean(row) for row in self.factors], self.memory
        durations, at_start, at_end = (
            tuple(amount * means[index // 3] for index, amount in enumerate(amounts))
            for amounts in (self.durations, memory.at_start, memory.at_end)
        )
        return replace(
            self, durations=durations, memory=replace(memory, at_start=at_start, at_end=at_end), factors=(), order=()
        )

    def in_order(self, order: Sequence[int]) -> Problem:
        """The problem whose operations take the microbatches in this order, by their numbers."""
        places = {microbatch: place for place, microbatch in enumerate(self.order or range(self.num_microbatches))}
        factors = tuple(tuple(row[places[microbatch]] for microbatch in order) for row in self.factors)
        return replace(self, factors=factors, order=tuple(order))

    @property
    def least(self) -> tuple[float, ...]:
        """Per rank, the room for one microbatch on all of its stages: on each for the largest, if they differ."""
        saved = _largest(self.memory.at_start[::3], self.factors)
        spare = self.memory.spare
        return tuple(sum(saved[stage] for stage in own) + more for own, more in zip(self.stages, spare, strict=True))

    def most_alive(self, stage: int) -> int:
        """The most activations of one stage for which its rank has room, if it keeps nothing else. If microbatches
        differ, they are the smallest.
        """
        saved = self.memory.at_start[3 * stage] * (min(self.factors[stage]) if self.factors else 1)
        room = self.memory.room[self.ranks[stage]]
        return floor(min(room / saved, self.num_microbatches)) if saved else self.num_microbatches


def make_problem(
    placement: Placement,
    microbatches: int,
    cost: CostModel,
    memory_cap: MemoryCap | None = None,
    bytes_cap: MemoryCap | None = None,
    objective: Objective = "makespan",
) -> Problem:
    """Makes the problem of a search. Raises UsageError for a placement of two paths, for a stage without a cost, and
    for an unknown objective. Also raises it for two caps, and for a cap in bytes if the cost model has no bytes. Also
    raises it for a cap below one microbatch on all stages of a rank, and for another number of factors.
    """
    require_placement(placement)
    require_cost_model(cost)
    require_positive(microbatches=microbatches)
    require_factors(cost.microbatch_factors, microbatches)
    if objective not in get_args(Objective):
        raise UsageError(f"objective must be {' or '.join(map(repr, get_args(Objective)))}, got {objective!r}")
    if len(placement.paths) > 1:
        raise UsageError(f"a search takes placements of one path; this one has {len(placement.paths)}")
    (path,) = placement.paths
    stages = range(len(path))
    operations = [(kind, stage) for stage in stages for kind in HALVES]
    makers = sources(HALVES, len(path))
    source = [-1 if (maker := makers[operation]) is None else operations.index(maker) for operation in operations]
    return Problem(
        placement,
        microbatches,
        path,
        tuple(map(placement.stages_of, range(placement.num_ranks))),
        tuple(float(cost.duration(kind, stage)) for kind, stage in operations),
        tuple(source),
        tuple(0.0 if maker < 0 else _delay(cost, path, maker // 3, user // 3) for user, maker in enumerate(source)),
        _memory(placement, cost, memory_cap, bytes_cap),
        objective,
        cost.factors,
    )


def _largest(amounts: Sequence[float], factors: Sequence[Row]) -> list[float]:
    """Amounts per stage, of the microbatch that is largest there."""
    return [amount * (max(factors[stage]) if factors else 1) for stage, amount in enumerate(amounts)]


def _delay(cost: CostModel, path: Sequence[int], maker: int, user: int) -> float:
    """The time between the ranks of two stages, the same or neighbours; a gradient is as large as its activation."""
    return 0.0 if path[maker] == path[user] else float(cost.transfer(min(maker, user), path[maker], path[user]))


def _memory(
    placement: Placement, cost: CostModel, memory_cap: MemoryCap | None, bytes_cap: MemoryCap | None
) -> MemoryUse:
    """In activations of one chunk, unless `bytes_cap` is given."""
    factors = cost.factors
    if bytes_cap is None:
        sizes: Mapping[Content, Sequence[float]] = {Content.SAVED: (1.0,) * placement.num_stages}
        return _within("memory_cap", memory_cap, placement, sizes, placement.chunks_per_rank, factors)
    if memory_cap is not None:
        raise UsageError("memory_cap counts activations and bytes_cap counts bytes: pass only one of them")
    if Content.SAVED not in cost.sizes:
        raise UsageError(
            "bytes_cap needs costs with saved_bytes, and deferred_bytes if weight-gradient halves hold any"
        )
    return _within("bytes_cap", bytes_cap, placement, cost.sizes, None, factors)


def _within(
    name: str,
    cap: MemoryCap | None,
    placement: Placement,
    sizes: Mapping[Content, Sequence[float]],
    unit: float | None,
    factors: Sequence[Row],
) -> MemoryUse:
    """The memory of `sizes` per content and stage within `cap`, which counts in units of so many of them. Raises
    UsageError for a cap that is too small for a microbatch with the largest factor of each stage, with the least that
    is not.
    """

    def amount(contents: Sequence[Content], stage: int) -> float:
        return float(sum(sizes[content][stage] for content in contents if content in sizes))

    changes = [(CHANGES[kind], stage) for stage in range(placement.num_stages) for kind in HALVES]
    at_start = tuple(amount(change.from_start, stage) for change, stage in changes)
    at_end = tuple(amount(change.from_end, stage) - amount(change.frees, stage) for change, stage in changes)
    stages = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    more = _largest(at_end[1::3], factors)
    spare = tuple(max(0.0, *(more[stage] for stage in own)) for own in stages)
    share = unit or 1
    saved = _largest(at_start[::3], factors)
    needed = (sum(saved[stage] for stage in own) + more for own, more in zip(stages, spare, strict=True))
    least = [amount / share for amount in needed]
    caps = [inf] * len(stages) if cap is None else cap_per_rank(cap, least, name)
    for rank, (most, need) in enumerate(zip(caps, least, strict=True)):
        if not most * (1 + ROUNDING) >= need:
            raise UsageError(f"{name} {most:g} is too small: rank {rank} needs at least {need:g}, for one microbatch")
    return MemoryUse(at_start, at_end, tuple(most * share * (1 + ROUNDING) for most in caps), spare, unit)


def keeps_within(problem: Problem, timeline: Timeline) -> bool:
    """Whether each rank of a timeline keeps no more than it has room for."""
    return all(peak <= most for peak, most in zip(amounts(problem, timeline), problem.memory.room, strict=True))


def amounts(problem: Problem, timeline: Timeline) -> tuple[float, ...]:
    """Per rank, the most that it keeps, in the unit of the problem's memory."""
    unit = problem.memory.unit
    return timeline.peak_bytes if unit is None else tuple(peak * unit for peak in timeline.peak_activations)


def with_hidden(problem: Problem, overlap: float) -> Problem:
    """`problem` for schedules with pairs: every forward hides as much of its time as a pair can hide of it. So a bound
    of this problem holds for them, too: a pair takes no less time than this forward and then its backward.
    """
    durations = (time * (1 - overlap) if index % 3 == 0 else time for index, time in enumerate(problem.durations))
    return replace(problem, durations=tuple(durations))


def to_schedule(name: str, problem: Problem, sequences: Sequence[Operations]) -> Schedule:
    """The schedule whose rows are `sequences`, one per rank."""
    order = problem.order or range(problem.num_microbatches)
    rows = (
        tuple(Action(HALVES[operation % 3], operation // 3, order[place]) for operation, place in numbered(sequence))
        for sequence in sequences
    )
    return Schedule(name, problem.placement, problem.num_microbatches, tuple(rows))


def numbered(sequence: Operations) -> Iterator[tuple[int, int]]:
    """The operations of a sequence, each with its microbatch."""
    done = defaultdict[int, int](int)
    for operation in sequence:
        yield operation, done[operation]
        done[operation] += 1


def to_sequences(schedule: Schedule) -> list[Operations]:
    """Per rank of a schedule, its sequence of operations. A full backward is split into its two halves, and
    microbatches lose their numbers. Actions that hold up no rank, such as reductions, are left out.
    """
    return [
        [3 * action.stage + half for action in schedule.actions(rank) for half in PARTS[action.kind]]
        for rank in range(len(schedule.rows))
    ]


def arrangements(sizes: Sequence[float]) -> tuple[list[int], ...]:
    """Plain ones, as the microbatch at each place: small ones at both ends, where others wait for them; small ones
    first, small ones last, and two thirds of the small ones first.
    """
    ascending = sorted(range(len(sizes)), key=lambda microbatch: sizes[microbatch])
    third = [microbatch for place, microbatch in enumerate(ascending) if place % 3 < 2]
    return ascending[::2] + ascending[1::2][::-1], ascending, ascending[::-1], third + ascending[2::3][::-1]
