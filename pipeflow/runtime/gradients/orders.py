"""Orders: when the ranks of a pipeline come to reduce which of their stages, as a schedule has it."""

from __future__ import annotations

from collections.abc import Sequence

from pipeflow.core.action import Kind
from pipeflow.core.schedule import Schedule

Orders = Sequence[Sequence[int]]
"""Per rank of a pipeline, its stages in the order in which it reduces them."""


def orders_of(schedule: Schedule) -> Orders:
    """The orders that a schedule has; on each rank the stages of which it has no gradient come last."""
    reducing = schedule.with_reductions()
    return [_order(reducing, rank) for rank in range(schedule.placement.num_ranks)]


def _order(schedule: Schedule, rank: int) -> list[int]:
    reduced = [action.stage for action in schedule.actions(rank) if action.kind is Kind.R]
    return [*reduced, *(stage for stage in schedule.placement.stages_of(rank) if stage not in reduced)]
