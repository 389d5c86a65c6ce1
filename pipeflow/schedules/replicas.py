"""Replicas of a schedule as one schedule, and the schedule of the ranks that are left when some fail. Must not contain:
how orders vary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf

from pipeflow.core.action import Action, Entry, Kind, Pair
from pipeflow.core.cost import CostModel, require_cost_model
from pipeflow.core.errors import UsageError, numbers_of
from pipeflow.core.placement import Placement, require_positive
from pipeflow.core.schedule import Schedule, require_schedule, require_unsliced
from pipeflow.schedules.order_search import search
from pipeflow.schedules.orders.problem import HALVES
from pipeflow.schedules.orders.search import Found

_TRIED = 20  # orders, while all ranks that are left wait


def replicated(schedule: Schedule, replicas: int) -> Schedule:
    """The schedule of several replicas as one: each replica runs `schedule`.

    Of N replicas with R ranks each, rank r of replica k is rank k R + r, and its microbatch m is microbatch m N + k.
    The result is sound if `schedule` is.

    Raises UsageError for fewer than one replica.

    >>> from pipeflow import make_schedule
    >>> print(replicated(make_schedule("1f1b", ranks=2, microbatches=2), replicas=2))
    rank 0: 0F0 0F2 0B0 0B2
    rank 1: 1F0 1B0 1F2 1B2
    rank 2: 0F1 0F3 0B1 0B3
    rank 3: 1F1 1B1 1F3 1B3
    """
    require_schedule(schedule)
    require_positive(replicas=replicas)
    paths, ranks, each = schedule.placement.paths, len(schedule.rows), range(replicas)
    return replace(
        schedule,
        placement=Placement(tuple(tuple(k * ranks + rank for rank in path) for path in paths for k in each)),
        num_microbatches=schedule.num_microbatches * replicas,
        rows=tuple(tuple(_of_replica(row, k, replicas)) for k in each for row in schedule.rows),
    )


def _of_replica(row: Iterable[Entry], number: int, replicas: int) -> Iterator[Entry]:
    def moved(action: Action) -> Action:
        return replace(action, microbatch=action.microbatch * replicas + number)

    for entry in row:
        yield moved(entry) if isinstance(entry, Action) else Pair(moved(entry.forward), moved(entry.backward))


def without_ranks(
    schedule: Schedule,
    dead: Iterable[int],
    *,
    cost: CostModel | None = None,
    memory_cap: float | Sequence[float] | None = None,
    bytes_cap: float | Sequence[float] | None = None,
    budget: float = 10.0,
    candidates: int | None = None,
) -> Found:
    """The schedule for the ranks of `schedule` that are left when some have failed: other ranks that hold the same
    stages compute their microbatches, too.

    The microbatches of a failed rank are divided evenly over the ranks that hold its stage, and `search` finds an order
    in which most of this work lies in bubbles (S. Gandhi et al., ReCycle, arXiv 2405.14009). Ranks that are left keep
    their order and get the numbers from 0. The order has split backwards and no reductions.

    Args:
        schedule: a schedule with several ranks for each stage, such as `replicated` makes.
        dead: the ranks that have failed.
        cost: times of stages and transfers, and bytes. None: equal times for all stages, and free transfers.
        memory_cap, bytes_cap, budget, candidates: of `search`. Caps per rank are those of the ranks that are left.

    Raises UsageError for a rank that does not exist, and for a stage that no rank is left for. Also raises it for a
    schedule with other actions than forwards, backwards and reductions, and as `search` does.

    >>> from pipeflow import make_schedule
    >>> whole = replicated(make_schedule("1f1b", ranks=2, microbatches=2), replicas=3)
    >>> found = without_ranks(whole, [3])
    >>> found.schedule.placement.ranks_of(1), found.timeline.makespan, found.gap
    ((1, 4), 10.0, 0.0)
    """
    require_schedule(schedule)
    require_unsliced(schedule, "a schedule without some ranks")
    if more := sorted(schedule.kinds - {*HALVES, Kind.B, Kind.R}):
        raise UsageError(
            f"schedule {schedule.name!r} has actions of kind {more[0]}, which a search cannot place again: "
            f"give schedule.without({', '.join(f'Kind.{kind}' for kind in more)})"
        )
    gone, last = {*numbers_of("dead", dead)}, len(schedule.rows) - 1
    if wrong := sorted(gone - {*range(last + 1)}):
        raise UsageError(f"there is no rank {wrong[0]}: schedule {schedule.name!r} has ranks 0 to {last}")
    cost = CostModel.even(schedule.placement) if cost is None else cost
    require_cost_model(cost)
    placement = _left(schedule, gone, cost)
    return search(
        placement,
        schedule.num_microbatches,
        cost,
        memory_cap=memory_cap,
        bytes_cap=bytes_cap,
        budget=budget,
        candidates=candidates,
        name=f"{schedule.name} without {_shown(gone)}" if gone else schedule.name,
    )


def of_survivors(schedule: Schedule, replicas: int, dead: Collection[int]) -> Schedule:
    """The schedule of the ranks that are left of `replicas` that each run `schedule`, when the ranks `dead` have
    failed: the same on all ranks, and found within a second. A rank keeps no more activations than before, if there is
    such an order. Raises UsageError as `without_ranks` does.
    """
    whole = replicated(schedule, replicas)
    kept = [_most_kept(schedule, rank) for rank in range(len(schedule.rows))] * replicas
    caps = [cap for rank, cap in enumerate(kept) if rank not in dead]
    try:
        return without_ranks(whole, dead, memory_cap=caps, candidates=_TRIED, budget=inf).schedule
    except UsageError:  # also if ranks would wait for each other under these caps
        return without_ranks(whole, dead, candidates=_TRIED, budget=inf).schedule


def _most_kept(schedule: Schedule, rank: int) -> float:
    """The most activations that a rank keeps at once, in microbatches of its whole share of the model."""
    steps = [(action.kind is Kind.F) - (action.kind in (Kind.B, Kind.I)) for action in schedule.actions(rank)]
    return max(1.0, max(accumulate(steps), default=0) / schedule.placement.chunks_per_rank)


def _shown(ranks: set[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _left(schedule: Schedule, gone: set[int], cost: CostModel) -> Placement:
    """The placement on the ranks that are left, with a path for each microbatch. In the place of a rank that is gone,
    it has the rank with the least work so far of those that hold the stage.
    """
    placement = schedule.placement
    left = [rank for rank in range(placement.num_ranks) if rank not in gone]
    work = dict.fromkeys(left, 0.0)
    lost: list[tuple[int, int]] = []  # microbatch and stage
    paths = [[*placement.paths[number % len(placement.paths)]] for number in range(schedule.num_microbatches)]

    def add(microbatch: int, stage: int, rank: int) -> None:
        paths[microbatch][stage] = rank
        work[rank] += cost.factor(stage, microbatch) * sum(cost.duration(half, stage) for half in HALVES)

    for microbatch, path in enumerate(paths):
        for stage, rank in enumerate(path):
            if rank in gone:
                lost.append((microbatch, stage))
            else:
                add(microbatch, stage, rank)
    for microbatch, stage in lost:
        holders = [rank for rank in placement.ranks_of(stage) if rank not in gone]
        if not holders:
            raise UsageError(
                f"no rank is left that holds stage {stage}: start again from the newest checkpoint, with a layout of "
                f"{len(left)} ranks"
            )
        add(microbatch, stage, min(holders, key=lambda rank: work[rank]))
    numbers = {rank: number for number, rank in enumerate(left)}
    return Placement(tuple(tuple(numbers[rank] for rank in path) for path in paths))
