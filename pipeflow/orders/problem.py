"""Problem: what a search for an order starts from, flattened into numbers; and how rows become schedules.

A row is a sequence of operations: operation `3 * stage + half` is the next F (half 0), I (1) or W (2) of a stage.
Microbatches are alike and every operation meets them in order, so a sequence says all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from pipeflow.analysis.memory_cap import MemoryCap, cap_per_rank
from pipeflow.core.action import Action, Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import DATAFLOW, sources
from pipeflow.core.errors import UsageError
from pipeflow.core.liveness import ACTIVATIONS
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule

HALVES = (Kind.F, Kind.I, Kind.W)
KEEPS = tuple(ACTIVATIONS[kind] for kind in HALVES)  # by how many more activations a rank keeps after each
PARTS = {  # what a kind of action is made of; nothing, if it holds up no rank
    kind: [half for half, part in enumerate(HALVES) if set(DATAFLOW[part].takes) <= set(flow.takes)]
    for kind, flow in DATAFLOW.items()
}
ROUNDING = 1e-9  # by which a cap of, say, 2/3 of a share of 3 chunks may miss a whole number
Operations = list[int]


@dataclass(frozen=True, slots=True)
class Problem:
    """Per operation its `durations`, the operation whose value it waits for (`source`, -1 for none) and how long that
    value travels (`delays`); per rank its stages in ascending order and how many chunk activations it may keep
    (`slots`).
    """

    placement: Placement
    num_microbatches: int
    ranks: tuple[int, ...]  # per stage
    stages: tuple[tuple[int, ...], ...]  # per rank
    durations: tuple[float, ...]
    source: tuple[int, ...]
    delays: tuple[float, ...]
    slots: tuple[int, ...]

    @property
    def work(self) -> tuple[float, ...]:
        """Per rank, how long it is busy."""
        return tuple(
            self.num_microbatches * sum(sum(self.durations[3 * stage : 3 * stage + 3]) for stage in stages)
            for stages in self.stages
        )


def make_problem(
    placement: Placement, microbatches: int, cost: CostModel, memory_cap: MemoryCap | None = None
) -> Problem:
    """Raises UsageError for a placement of two paths, a stage without a cost, and a cap under which some rank cannot
    keep one microbatch on all of its stages.
    """
    require_positive(microbatches=microbatches)
    if len(placement.paths) > 1:
        raise UsageError("a search takes placements of one path; this one has two")
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
        _slots(placement, microbatches, memory_cap),
    )


def _delay(cost: CostModel, path: Sequence[int], maker: int, user: int) -> float:
    """The time between the ranks of two stages, the same or neighbours; a gradient is as large as its activation."""
    return 0.0 if path[maker] == path[user] else float(cost.transfer(min(maker, user), path[maker], path[user]))


def _slots(placement: Placement, microbatches: int, memory_cap: MemoryCap | None) -> tuple[int, ...]:
    share = placement.chunks_per_rank
    chunks = [len(placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    if memory_cap is None:
        return tuple(microbatches * number for number in chunks)
    caps = cap_per_rank(memory_cap, [number / share for number in chunks])
    for rank, (cap, number) in enumerate(zip(caps, chunks, strict=True)):
        if not cap * share + ROUNDING >= number:
            raise UsageError(
                f"memory_cap {cap:g} is too small: rank {rank} needs at least {number / share:g}, for one microbatch"
            )
    return tuple(
        floor(min(cap * share + ROUNDING, microbatches * number)) for cap, number in zip(caps, chunks, strict=True)
    )


def to_schedule(name: str, problem: Problem, sequences: Sequence[Operations]) -> Schedule:
    """The schedule whose rows are `sequences`, one per rank."""
    rows = []
    for sequence in sequences:
        count = [0] * len(problem.durations)
        row = []
        for operation in sequence:
            row.append(Action(HALVES[operation % 3], operation // 3, count[operation]))
            count[operation] += 1
        rows.append(tuple(row))
    return Schedule(name, problem.placement, problem.num_microbatches, tuple(rows))


def to_sequences(schedule: Schedule) -> list[Operations]:
    """Per rank of a schedule its sequence, a full backward taken as its two halves and every microbatch as any other;
    what holds up no rank, as reductions, is left out.
    """
    return [
        [3 * action.stage + half for action in schedule.actions(rank) for half in PARTS[action.kind]]
        for rank in range(len(schedule.rows))
    ]
