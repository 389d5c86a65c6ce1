"""Simulate: when every action would run. An action starts when its values are there and its rank is free."""

from __future__ import annotations

from pipeflow.analysis.order import Order
from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import ScheduleError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Span, Timeline


def simulate(schedule: Schedule, cost: CostModel | None = None) -> Timeline:
    """The timeline of `schedule` under `cost` (by default 1 for F, 1 for each half of a backward, transfers free).

    A value made on another rank arrives a transfer after its maker ends; transfers overlap computation and
    each other. A full backward is seen by its neighbour only when whole. A pair starts when both of its actions
    have what they need, takes the sum of their times, and is seen by others when whole.

    Raises ScheduleError when the schedule cannot run to its end; `verify` says why.
    """
    cost = CostModel.even(schedule.placement) if cost is None else cost
    durations = {
        (kind, stage): cost.duration(kind, stage) for kind in Kind for stage in range(schedule.placement.num_stages)
    }
    order = Order(schedule)
    delays = [_delay(cost, content, stage) for content, stage in order.ends]
    many = schedule.num_microbatches
    made = [0.0] * (len(delays) * many)  # per value, when it exists
    maker = [0] * (len(delays) * many)  # per value, on which rank
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    free = [0.0] * len(schedule.rows)
    for rank, actions, needs, makes in order:
        start = free[rank]
        for value in needs:
            there = made[value] if maker[value] == rank else made[value] + delays[value // many]
            if there > start:
                start = there
        for action in actions:
            end = start + durations[action.kind, action.stage]
            spans[rank].append(Span(action, rank, start, end))
            start = end
        free[rank] = start
        for value in makes:
            made[value] = start
            maker[value] = rank
    if order.stuck:
        entries = ", ".join(f"rank {rank} at {schedule.rows[rank][position]}" for rank, position in order.stuck[:8])
        raise ScheduleError(f"schedule {schedule.name!r} cannot run to its end: stuck are {entries}; see verify()")
    return Timeline(schedule.name, schedule.placement, tuple(map(tuple, spans)))


def _delay(cost: CostModel, content: Content, stage: int) -> float:
    """The time for a value to reach another rank; a gradient is as large as the activation it belongs to."""
    match content:
        case Content.ACTIVATION:
            return cost.transfer(stage)
        case Content.GRADIENT:
            return cost.transfer(stage - 1)
        case Content.SAVED | Content.DEFERRED:
            return 0.0
