"""order_for: the microbatches and the schedule for a batch of samples of different lengths. Must not contain: how they
are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import replace
from functools import lru_cache
from math import isfinite
from numbers import Real

from pipeflow.core.cost import CostModel, require_cost_model
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement, require_placement, require_positive
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.families import schedules_on
from pipeflow.schedules.order_search import search
from pipeflow.schedules.orders.arrangement import Rerun
from pipeflow.schedules.orders.batch_order import BatchOrder, ordered


def order_for(
    lengths: Sequence[float],
    placement: Placement,
    cost: CostModel,
    microbatches: int,
    quadratic: float = 0.0,
    bytes_cap: float | Sequence[float] | None = None,
    budget: float = 0.05,
    *,
    padded: bool = False,
    among: Iterable[Schedule] | None = None,
) -> BatchOrder:
    """Divides a batch into microbatches of like cost, puts them in order, and chooses the order of actions.

    A sample of length l costs l + `quadratic` l^2, and a microbatch the sum over its samples. The order of actions is
    that of the best named schedule of the placement, or one for this batch if it is shorter by more than 1 %: large
    microbatches go first or, if this keeps more than `bytes_cap`, a search decides. Of named schedules that take the
    same time, the one that keeps least is chosen.

    The result depends on the arguments alone. Every rank that has the same ones finds the same order.

    Args:
        lengths: per sample of the batch, its length, such as the number of its tokens.
        placement: which rank holds which stage.
        cost: the times and bytes of a mean microbatch.
        microbatches: number of microbatches.
        quadratic: the cost of attention: how much more a sample costs per square of its length.
        bytes_cap: the most bytes that a rank may keep, as `Timeline.peak_bytes` counts them: one number, or one per
            rank.
        budget: seconds to plan on a usual processor. It is counted in actions that are tried, not in time.
        padded: whether the samples of a microbatch are padded to the longest. The cost of a microbatch is then that of
            its longest sample, times their number, and samples of like length come together.
        among: the only schedules to choose from. None: the named ones of the placement, and orders for the batch.

    Raises UsageError for lengths that are not positive, for fewer samples than microbatches, for costs of another
    number of stages, and for a cap that no order keeps.

    >>> from pipeflow import CostModel, Placement
    >>> placement = Placement.linear(2)
    >>> found = order_for([700, 90, 80, 60, 50, 420, 300], placement, CostModel.even(placement), microbatches=3)
    >>> found.groups
    ((5, 3), (0,), (6, 1, 2, 4))
    >>> [round(factor, 2) for factor in found.cost.microbatch_factors]
    [0.85, 1.24, 0.92]
    """
    if not budget > 0:
        raise UsageError(f"budget must be positive, got {budget}")
    require_placement(placement)
    require_cost_model(cost)
    costs = _costs(lengths, quadratic, microbatches)
    alike = replace(cost, microbatch_factors=())
    reruns = _reruns(placement, microbatches, alike) if among is None else _rerun_of(tuple(among), alike)
    for schedule in (rerun.schedule for rerun in reruns):
        if schedule.placement != placement or schedule.num_microbatches != microbatches:
            raise UsageError(f"schedule {schedule.name!r} has another placement or other microbatches than the batch")
    searches = among is None
    return ordered(costs, cost, reruns, padded=padded, bytes_cap=bytes_cap, budget=budget, searches=searches)


@lru_cache(maxsize=8)
def _reruns(placement: Placement, microbatches: int, cost: CostModel) -> tuple[Rerun, ...]:
    """The different named schedules of a placement, or one that is searched for if there are none."""
    different = {schedule.rows: schedule for schedule in schedules_on(placement, microbatches)}
    named = different.values() or [search(placement, microbatches, cost, candidates=100).schedule]
    return tuple(Rerun(schedule, cost) for schedule in named)


@lru_cache(maxsize=8)
def _rerun_of(schedules: tuple[Schedule, ...], cost: CostModel) -> tuple[Rerun, ...]:
    if not schedules:
        raise UsageError("among has no schedule: pass some, or leave it out")
    return tuple(Rerun(schedule, cost) for schedule in schedules)


def _costs(lengths: Sequence[float], quadratic: float, microbatches: int) -> list[float]:
    """The cost of each sample."""
    require_positive(microbatches=microbatches)
    if isinstance(lengths, str) or not isinstance(lengths, Sized):
        raise UsageError(f"lengths must be a list with the length of each sample, got {lengths!r}")
    if len(lengths) < microbatches:
        raise UsageError(
            f"a batch of {len(lengths)} samples cannot fill {microbatches} microbatches: use fewer of them"
        )
    for sample, length in enumerate(lengths):
        if not (isinstance(length, Real) and isfinite(length) and length > 0):
            raise UsageError(f"the length of sample {sample} must be positive, got {length}")
    if not (isfinite(quadratic) and quadratic >= 0):
        raise UsageError(f"quadratic must be finite and not negative, got {quadratic}")
    return [length + quadratic * length * length for length in lengths]
