"""Orders: the order in which each rank of a pipeline reduces its stages in a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from pipeflow.core.action import Kind
from pipeflow.core.schedule import Schedule

Orders = Sequence[Sequence[int]]
"""For each rank of a pipeline, its stages in the order in which it reduces them."""


def orders_of(schedule: Schedule) -> Orders:
    """The orders in a schedule. Stages for which a rank computes no gradient come last."""
    reducing = schedule.with_reductions()
    return [_order(reducing, rank) for rank in range(schedule.placement.num_ranks)]


def _order(schedule: Schedule, rank: int) -> list[int]:
    reduced = [action.stage for action in schedule.actions(rank) if action.kind is Kind.R]
    return [*reduced, *(stage for stage in schedule.placement.stages_of(rank) if stage not in reduced)]
