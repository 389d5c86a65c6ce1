"""Problem: what a search for an order starts from, flattened into numbers; and how rows become schedules.

A row is a sequence of operations: operation `3 * stage + half` is the next F (half 0), I (1) or W (2) of a stage. Every
operation takes its microbatches in one order, so the sequence alone determines the row. A stage is here one of one
path: of a placement of several different paths, stage s of the k-th one has the number k * num_stages + s. If
microbatches are cut, it is that of one slice, too: slice t of stage s has the number s * slices + t.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import floor, inf
from statistics import fmean
from typing import Literal, get_args

from pipeflow.core.action import Action, Kind
from pipeflow.core.cost import CostModel, require_cost_model, require_ends, slice_lengths, slice_works
from pipeflow.core.dataflow import DATAFLOW, Content, sources
from pipeflow.core.errors import UsageError
from pipeflow.core.factors import Row, require_factors
from pipeflow.core.liveness import CHANGES, MemoryCap, cap_per_rank
from pipeflow.core.placement import Placement, require_placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Span, Timeline, changes_of_buffers

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
    for none), and `delays` the time of the transfer of that value. `before` is the operation of the neighbouring slice
    that comes first on its rank for each microbatch, -1 for none. `stages` has per rank its stages in ascending order.
    `objective` is what the search makes small. `order` is that in which all operations take the microbatches; an empty
    one is that of their numbers. `places` has per stage the places in this order of the microbatches that pass it, and
    `factors` those of these microbatches, if they differ.
    """

    placement: Placement
    num_microbatches: int
    places: tuple[tuple[int, ...], ...]  # per stage
    ranks: tuple[int, ...]  # per stage
    stages: tuple[tuple[int, ...], ...]  # per rank
    durations: tuple[float, ...]
    source: tuple[int, ...]
    before: tuple[int, ...]
    delays: tuple[float, ...]
    memory: MemoryUse
    objective: Objective
    factors: tuple[Row, ...] = ()
    order: tuple[int, ...] = ()
    slices: int = 1

    @property
    def stages_per_path(self) -> int:
        """The number of stages of one path, each slice apart."""
        return self.placement.num_stages * self.slices

    def comes_first(self, stage: int, other: int) -> bool:
        """Whether in any order, the F of a stage comes before that of another one of its rank and path for each
        microbatch, and its I after that: it is of an earlier stage, or of an earlier slice, and not later in the other.
        """
        one, two = divmod(stage, self.slices), divmod(other, self.slices)
        return one != two and one[0] <= two[0] and one[1] <= two[1]

    @property
    def work(self) -> tuple[float, ...]:
        """The busy time of each rank."""
        whole = [*map(sum, self.factors)] or [*map(len, self.places)]
        return tuple(
            sum(whole[stage] * sum(self.durations[3 * stage : 3 * stage + 3]) for stage in stages)
            for stages in self.stages
        )

    def each(self, amounts: Sequence[float]) -> list[Sequence[float]]:
        """Per operation and microbatch, its part of amounts that are per operation at factor 1."""
        if not self.factors:
            return [(amount,) * len(self.places[index // 3]) for index, amount in enumerate(amounts)]
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
        now, places = self.order or range(self.num_microbatches), _places(self.placement, order, self.slices)
        factors = []
        for before, after, row in zip(self.places, places, self.factors, strict=True):
            known = {now[place]: factor for place, factor in zip(before, row, strict=True)}
            factors.append(tuple(known[order[place]] for place in after))
        return replace(self, places=places, factors=tuple(factors), order=tuple(order))

    @property
    def of_paths(self) -> list[list[int]]:
        """The stages of each rank, those of each path apart."""
        return [own for stages in self.stages for own in each_path(stages, self.stages_per_path)]

    @property
    def least(self) -> tuple[float, ...]:
        """Per rank, the room for one microbatch on all of its stages: on each for the largest, if they differ."""
        saved = _largest(self.memory.at_start[::3], self.factors)
        return _least(self.stages, self.stages_per_path, saved, self.memory.spare)

    def most_alive(self, stage: int) -> int:
        """The most activations of one stage for which its rank has room, if it keeps nothing else. If microbatches
        differ, they are the smallest.
        """
        saved = self.memory.at_start[3 * stage] * (min(self.factors[stage]) if self.factors else 1)
        room, most = self.memory.room[self.ranks[stage]], len(self.places[stage])
        return floor(min(room / saved, most)) if saved else most


def make_problem(
    placement: Placement,
    microbatches: int,
    cost: CostModel,
    memory_cap: MemoryCap | None = None,
    bytes_cap: MemoryCap | None = None,
    objective: Objective = "makespan",
    slices: int = 1,
) -> Problem:
    """Makes the problem of a search, whose microbatches are cut into so many slices. Raises UsageError for a stage
    without a cost, and for an unknown objective. Also raises it for two caps, and for a cap in bytes if the cost model
    has no bytes. Also raises it for a cap below one microbatch on all stages of a rank, and for another number of
    factors, or of ends of slices.
    """
    require_placement(placement)
    require_cost_model(cost)
    require_positive(microbatches=microbatches, slices=slices)
    require_factors(cost.microbatch_factors, microbatches)
    require_ends(cost.slice_ends, slices)
    if objective not in get_args(Objective):
        raise UsageError(f"objective must be {' or '.join(map(repr, get_args(Objective)))}, got {objective!r}")
    many, paths = placement.num_stages * slices, _different(placement, microbatches)
    lengths, works = ((1.0,), (1.0,)) if slices == 1 else (slice_lengths(cost, slices), slice_works(cost, slices))
    operations = [
        (kind, stage, part) for stage in range(placement.num_stages) for part in range(slices) for kind in HALVES
    ]
    source, before = _precedences(operations, placement.num_stages, slices)
    delays = (
        0.0 if maker < 0 else _delay(cost, path, operations[maker][1], stage, lengths[part])
        for path in paths
        for (_, stage, part), maker in zip(operations, source, strict=True)
    )
    on_ranks = [rank for path in paths for rank in path for _ in range(slices)]
    stages, places = _stages(on_ranks, placement.num_ranks), _places(placement, range(microbatches), slices)
    table = [row for row in cost.factors for _ in range(slices)]
    factors = tuple(tuple(table[index % many][place] for place in own) for index, own in enumerate(places) if table)
    return Problem(
        placement,
        microbatches,
        places,
        tuple(on_ranks),
        stages,
        tuple(float(cost.duration(kind, stage)) * works[part] for kind, stage, part in operations) * len(paths),
        _on_each_path(source, len(paths)),
        _on_each_path(before, len(paths)),
        tuple(delays),
        _memory(placement, stages, cost, factors, memory_cap, bytes_cap, lengths),
        objective,
        factors,
        slices=slices,
    )


def _on_each_path(of_one: Sequence[int], paths: int) -> tuple[int, ...]:
    """The operations of all paths from those of one; -1 stays."""
    return tuple(-1 if each < 0 else len(of_one) * path + each for path in range(paths) for each in of_one)


def _precedences(
    operations: Sequence[tuple[Kind, int, int]], num_stages: int, slices: int
) -> tuple[list[int], list[int]]:
    """Per operation of one path, (kind, stage, slice), the operation whose value comes from another stage; and the one
    of the neighbouring slice on its stage. -1 for none.
    """
    makers, numbers = sources(HALVES, num_stages), {operation: number for number, operation in enumerate(operations)}
    found = [
        -1 if (maker := makers[kind, stage]) is None else numbers[*maker, part] for kind, stage, part in operations
    ]
    neighbours = [
        next((numbers.get((kind, stage, part + offset), -1) for _, offset in DATAFLOW[kind].across), -1)
        for kind, stage, part in operations
    ]
    return found, neighbours


def _different(placement: Placement, microbatches: int) -> dict[tuple[int, ...], int]:
    """The different paths that microbatches take, each with its number among them."""
    return {path: number for number, path in enumerate(dict.fromkeys(placement.paths[:microbatches]))}


def _places(placement: Placement, order: Sequence[int], slices: int) -> tuple[tuple[int, ...], ...]:
    """Per stage and slice of each path, the places in the order of the microbatches that pass it."""
    paths, numbers = placement.paths, _different(placement, len(order))
    found: list[list[int]] = [[] for _ in numbers]
    for place, microbatch in enumerate(order):
        found[numbers[paths[microbatch % len(paths)]]].append(place)
    return tuple(tuple(places) for places in found for _ in range(placement.num_stages * slices))


def _stages(on_ranks: Iterable[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Per rank, its stages of all paths. Raises UsageError for a rank without one."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(on_ranks):
        found[rank].append(stage)
    if [] in found:
        raise UsageError(f"no microbatch passes rank {found.index([])}: a search needs one for each path")
    return tuple(map(tuple, found))


def _largest(amounts: Sequence[float], factors: Sequence[Row]) -> list[float]:
    """Amounts per stage, of the microbatch that is largest there."""
    return [amount * (max(factors[stage]) if factors else 1) for stage, amount in enumerate(amounts)]


def _delay(cost: CostModel, path: Sequence[int], maker: int, user: int, length: float) -> float:
    """The time of a part of a microbatch of this `length` between the ranks of two stages, the same or neighbours. A
    gradient is as large as its activation.
    """
    ranks = path[maker], path[user]
    if ranks[0] == ranks[1]:
        return 0.0
    return float(cost.link(*ranks).latency + cost.holding(min(maker, user), *ranks) * length)


def _memory(
    placement: Placement,
    stages: Sequence[Sequence[int]],
    cost: CostModel,
    factors: Sequence[Row],
    memory_cap: MemoryCap | None,
    bytes_cap: MemoryCap | None,
    lengths: Sequence[float],
) -> MemoryUse:
    """In activations of one chunk, unless `bytes_cap` is given. `lengths` has the share of each slice."""
    if bytes_cap is None:
        sizes: Mapping[Content, Sequence[float]] = {Content.SAVED: (1.0,) * placement.num_stages}
        return _within("memory_cap", memory_cap, stages, sizes, placement.chunks_per_rank, factors, lengths)
    if memory_cap is not None:
        raise UsageError("memory_cap counts activations and bytes_cap counts bytes: pass only one of them")
    if Content.SAVED not in cost.sizes:
        raise UsageError(
            "bytes_cap needs costs with saved_bytes, and deferred_bytes if weight-gradient halves hold any"
        )
    return _within("bytes_cap", bytes_cap, stages, cost.sizes, None, factors, lengths)


def _within(
    name: str,
    cap: MemoryCap | None,
    stages: Sequence[Sequence[int]],
    sizes: Mapping[Content, Sequence[float]],
    unit: float | None,
    factors: Sequence[Row],
    lengths: Sequence[float],
) -> MemoryUse:
    """The memory of `sizes` per content and stage within `cap`, which counts in units of so many of them. A slice has
    the part of its length. Raises UsageError for a cap that is too small for a microbatch with the largest factor of
    each stage, with the least that is not.
    """
    many = len(sizes[Content.SAVED]) * len(lengths)
    operations = [(kind, stage % many) for stage in range(sum(map(len, stages))) for kind in HALVES]
    changes = [_changes(kind, *divmod(stage, len(lengths)), sizes, lengths) for kind, stage in operations]
    at_start, at_end = (tuple(each) for each in zip(*changes, strict=True))
    begins, ends = (_largest(each[1::3], factors) for each in (at_start, at_end))
    spare = tuple(max(begins[stage] for stage in own) + max(0.0, *(ends[stage] for stage in own)) for own in stages)
    share = unit or 1
    least = [need / share for need in _least(stages, many, _largest(at_start[::3], factors), spare)]
    caps = [inf] * len(stages) if cap is None else cap_per_rank(cap, least, name)
    for rank, (most, need) in enumerate(zip(caps, least, strict=True)):
        if not most * (1 + ROUNDING) >= need:
            raise UsageError(f"{name} {most:g} is too small: rank {rank} needs at least {need:g}, for one microbatch")
    return MemoryUse(at_start, at_end, tuple(most * share * (1 + ROUNDING) for most in caps), spare, unit)


def _changes(
    kind: Kind, stage: int, part: int, sizes: Mapping[Content, Sequence[float]], lengths: Sequence[float]
) -> tuple[float, float]:
    """What the action of a slice adds to what its rank keeps, when it starts and when it ends."""

    def amount(contents: Sequence[Content]) -> float:
        return float(sum(sizes[content][stage] for content in contents if content in sizes)) * lengths[part]

    change = CHANGES[kind]
    changes = [amount(change.from_start), amount(change.from_end) - amount(change.frees)]
    if len(lengths) > 1:
        for end, more in changes_of_buffers(Span(Action(kind, stage, 0, part), 0, 0, 1), sizes, 1.0, lengths):
            changes[int(end)] += more
    return changes[0], changes[1]


def _least(
    stages: Sequence[Sequence[int]], many: int, saved: Sequence[float], spare: Sequence[float]
) -> tuple[float, ...]:
    """Per rank, the room for one microbatch on all of its stages of the path that needs most; `many` stages a path."""
    return tuple(
        max(sum(saved[stage] for stage in own) for own in each_path(rank, many)) + more
        for rank, more in zip(stages, spare, strict=True)
    )


def each_path(stages: Sequence[int], many: int) -> list[list[int]]:
    """The stages of a rank, those of each path together; a path has so many stages."""
    return [[*own] for _, own in groupby(stages, lambda stage: stage // many)]


def keeps_within(problem: Problem, timeline: Timeline) -> bool:
    """Whether each rank of a timeline keeps no more than it has room for."""
    return all(peak <= most for peak, most in zip(amounts(problem, timeline), problem.memory.room, strict=True))


def amounts(problem: Problem, timeline: Timeline) -> tuple[float, ...]:
    """Per rank, the most that it keeps, in the unit of the problem's memory."""
    unit = problem.memory.unit
    return timeline.peak_bytes if unit is None else tuple(peak * unit for peak in timeline.peak_activations)


def with_hidden(problem: Problem, cost: CostModel) -> Problem:
    """`problem` for schedules with pairs: no exchange takes time, and every forward hides as much of its computation as
    a pair can hide of it. So a bound of this problem holds for them, too: a pair takes no less time than this forward
    and then its backward.
    """
    durations = list[float]()
    for stage in range(problem.placement.num_stages):
        forward, first, second = problem.durations[3 * stage : 3 * stage + 3]
        share = cost.exchange[stage] if cost.exchange else 0.0
        left = max(0.0, first - share * (first + second))
        durations += forward * (1 - share) * (1 - cost.overlap), left, (first + second) * (1 - share) - left
    return replace(problem, durations=tuple(durations))


def to_schedule(name: str, problem: Problem, sequences: Sequence[Operations]) -> Schedule:
    """The schedule whose rows are `sequences`, one per rank."""
    order, places = problem.order or range(problem.num_microbatches), problem.places
    slices, many = problem.slices, problem.stages_per_path

    def action(operation: int, index: int) -> Action:
        stage, part = divmod(operation // 3 % many, slices)
        microbatch = order[places[operation // 3][index]]
        return Action(HALVES[operation % 3], stage, microbatch, part if slices > 1 else None)

    rows = (tuple(action(*each) for each in numbered(sequence)) for sequence in sequences)
    return Schedule(name, problem.placement, problem.num_microbatches, tuple(rows), slices)


def numbered(sequence: Operations) -> Iterator[tuple[int, int]]:
    """The operations of a sequence, each with the number of those before it."""
    done = defaultdict[int, int](int)
    for operation in sequence:
        yield operation, done[operation]
        done[operation] += 1


def to_sequences(schedule: Schedule) -> list[Operations]:
    """Per rank of a schedule, its sequence of operations. A full backward is split into its two halves, and
    microbatches lose their numbers. Actions that hold up no rank, such as reductions, are left out.
    """
    paths, slices = schedule.placement.paths, schedule.slices
    many = schedule.placement.num_stages * slices
    numbers = _different(schedule.placement, schedule.num_microbatches)
    first = [3 * many * numbers[path] for path in paths[: schedule.num_microbatches]]
    return [
        [
            first[action.microbatch % len(first)] + 3 * (action.stage * slices + (action.slice or 0)) + half
            for action in schedule.actions(rank)
            for half in PARTS[action.kind]
        ]
        for rank in range(len(schedule.rows))
    ]


def arrangements(sizes: Sequence[float]) -> tuple[list[int], ...]:
    """Plain ones, as the microbatch at each place: small ones at both ends, where others wait for them; small ones
    first, small ones last, and two thirds of the small ones first.
    """
    ascending = sorted(range(len(sizes)), key=lambda microbatch: sizes[microbatch])
    third = [microbatch for place, microbatch in enumerate(ascending) if place % 3 < 2]
    return ascending[::2] + ascending[1::2][::-1], ascending, ascending[::-1], third + ascending[2::3][::-1]
