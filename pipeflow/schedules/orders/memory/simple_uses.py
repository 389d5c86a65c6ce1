"""Simple uses: schedules in which whole chunks are computed again or offloaded. Must not contain: a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from pipeflow.core.cost import SMALLEST, CostModel
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules.orders.memory.offloading import with_offload
from pipeflow.schedules.orders.memory.recomputation import with_recompute
from pipeflow.schedules.orders.memory.storage import Storage

FEW = 3  # chunks per rank, up to which every subset is used


def recomputed_uses(schedule: Schedule) -> Iterator[Schedule]:
    """`schedule` with each of `chunk_sets` computed again."""
    return (with_recompute(schedule, stages) for stages in chunk_sets(schedule.placement))


def offloaded_uses(schedule: Schedule, cost: CostModel) -> Iterator[Schedule]:
    """`schedule` with each of `chunk_sets` offloaded, all of them first. Raises UsageError as `with_offload` does."""
    return (with_offload(schedule, cost, stages) for stages in reversed(chunk_sets(schedule.placement)))


def chunk_sets(placement: Placement) -> list[tuple[int, ...]]:
    """The stages of sets of chunks, the same on all ranks, from small to large: every set of up to `FEW` chunks per
    rank, else the first ones and the last ones.
    """
    stages = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    chunks = max(map(len, stages))
    sets = [own for number in range(1, chunks + 1) for own in combinations(range(chunks), number)]
    if chunks > FEW:
        sets = [tuple(own) for number in range(1, chunks + 1) for own in _ends(chunks, number)]
    return [tuple(own[chunk] for own in stages for chunk in each if chunk < len(own)) for each in sets]


def _ends(chunks: int, number: int) -> list[range]:
    """The first so many chunks, and the last."""
    return [range(number), range(chunks - number, chunks)][: 1 if number == chunks else 2]


def may_keep(storage: Storage, timeline: Timeline) -> bool:
    """Whether offloads may keep a schedule within the room. They cannot where, even if copies ran all the time from the
    end of the first forward on, the ranks of a link together would keep too much.
    """
    if not storage.offloads:
        return False
    return all(_may_keep(storage, timeline, ranks) for ranks in storage.links)


def _may_keep(storage: Storage, timeline: Timeline, ranks: Sequence[int]) -> bool:
    stages = [stage for rank in ranks for stage in storage.problem.stages[rank]]
    first = min(span.end for rank in ranks for span in timeline.rows[rank][:1])
    rates = (storage.amounts[stage].saved / (storage.stage_times[stage].out or SMALLEST) for stage in stages)
    rate = max(rates)
    most, unit = sum(storage.room[rank] for rank in ranks), storage.problem.memory.unit or 1
    changes: list[tuple[float, float]] = []
    for rank in ranks:
        curve = [(0.0, 0.0), *timeline.memory(rank)]
        changes += ((time, (after - before) * unit) for (_, before), (time, after) in pairwise(curve))
    kept = 0.0
    for time, change in sorted(changes):
        kept += change
        if kept - rate * max(time - first, 0.0) > most:
            return False
    return True
