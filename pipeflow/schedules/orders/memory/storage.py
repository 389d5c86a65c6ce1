"""Storage: where what forwards save may be until their backwards, flattened into numbers as `problem` is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, NamedTuple, get_args

from pipeflow.core.action import Kind
from pipeflow.core.analysis.memory_cap import MemoryCap, cap_per_rank
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.several import names_of
from pipeflow.schedules.orders.memory.offloading import require_copies
from pipeflow.schedules.orders.problem import ROUNDING, Objective, Problem, make_problem

MemoryKind = Literal["offload", "recompute"]
"""A way to save memory that a search may use: copies to the host and back, or forwards that are computed again."""

Place = tuple[int, int]  # stage and microbatch


class Amounts(NamedTuple):
    """The amounts that a rank keeps of a microbatch on a stage: from a forward on, between the halves of a backward,
    and from a forward on that is computed again.
    """

    saved: float
    deferred: float
    inputs: float


class Times(NamedTuple):
    """The times to compute a forward again, and of the copies to the host and back."""

    again: float
    out: float
    back: float


@dataclass(frozen=True, slots=True)
class Storage:
    """What a rank keeps, in the unit of `Problem.memory`, and what it takes to keep it elsewhere.

    Attributes:
        problem: the problem without a cap.
        room: per rank, the most that it may keep.
        amounts, stage_times: per stage, those of a microbatch of factor 1.
        links: the ranks of each link to a host.
        offloads, recomputes: whether a search may use copies, and recomputation.
    """

    problem: Problem
    room: tuple[float, ...]
    amounts: tuple[Amounts, ...]
    stage_times: tuple[Times, ...]
    links: tuple[tuple[int, ...], ...]
    offloads: bool
    recomputes: bool

    def kept(self, place: Place) -> Amounts:
        """The amounts that a rank keeps of one microbatch on a stage."""
        found, factors = self.amounts[place[0]], self.problem.factors
        return Amounts(*(factors[place[1]] * each for each in found)) if factors else found

    def times(self, place: Place) -> Times:
        """The times of one microbatch on a stage."""
        found, factors = self.stage_times[place[0]], self.problem.factors
        return Times(*(factors[place[1]] * each for each in found)) if factors else found

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
    cap. Also raises it for unknown kinds, and for offload if the costs have no time of a copy.
    """
    kinds = names_of("kinds", kinds)
    if unknown := sorted({*kinds} - {*get_args(MemoryKind)}):
        raise UsageError(f"a search knows the kinds {' and '.join(get_args(MemoryKind))}, not {unknown[0]!r}")
    if "offload" in kinds:
        require_copies(cost)
    if memory_cap is not None and bytes_cap is not None:
        make_problem(placement, microbatches, cost, memory_cap, bytes_cap, objective)  # raises
    in_bytes = bytes_cap is not None
    problem = make_problem(placement, microbatches, cost, None, inf if in_bytes else None, objective)
    memory, none = problem.memory, (0.0,) * placement.num_stages
    inputs = cost.sizes.get(Content.INPUT, none) if in_bytes else none
    deferred = [-end for end in memory.at_end[2::3]]
    return Storage(
        problem,
        _room(problem, memory_cap, bytes_cap),
        tuple(map(Amounts, memory.at_start[::3], deferred, inputs)),
        tuple(map(Times, *(cost.durations[kind] for kind in (Kind.C, Kind.O, Kind.L)))),
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
