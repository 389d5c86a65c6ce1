"""Simulate: when every action would run. An action starts when its values have arrived and its stream is free. Must not
contain: costs, and the order in which actions can run.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from pipeflow.analysis.event_loop import Ran, loop, transfers, unlimited
from pipeflow.analysis.order import Order
from pipeflow.analysis.processors import SharedClock
from pipeflow.core.cost import CostModel, require_factors
from pipeflow.core.dataflow import COPIES, DATAFLOW, Stream
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.route import routes_among
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.core.span import Row
from pipeflow.core.timeline import Timeline


def simulate(schedule: Schedule, cost: CostModel | None = None) -> Timeline:
    """The timeline of `schedule` under `cost`.

    Transfers: a value from another rank arrives one transfer after the action that made it ends. Transfers overlap with
    computation, and with transfers on other links. Values occupy a link one after the other, and the latency of a value
    overlaps with the next value. An action waits for a value on a route only if the costs have its size.

    Backwards and pairs: another rank gets the gradient of a full backward only when the whole backward has ended. A
    pair starts when both of its actions have their values, and takes the time of `CostModel.pair`. Other ranks get its
    values when both actions have ended. To run pairs one action after the other, simulate `schedule.without_pairs()`.

    Reductions run beside computations. A reduction starts when all ranks that hold the stage have reached it, have its
    values, and have a free stream. It does not hold up its rank. The step ends when everything has ended.

    Copies to and from the host also run beside computations, in each direction one after the other. Ranks that share a
    link (`CostModel.copy_groups`) take turns in the order in which they reach their copies.

    Args:
        schedule: the schedule.
        cost: the costs. None: 1 for F, 1 for each half of a backward, and free transfers.

    Raises ScheduleError if the schedule cannot run to its end (`verify` says why), and UsageError for costs with
    another number of stages or microbatches.
    """
    require_schedule(schedule)
    return simulate_shared(schedule, CostModel.even(schedule.placement) if cost is None else cost, inf)


def simulate_shared(schedule: Schedule, cost: CostModel, processors: float) -> Timeline:
    """The timeline of `schedule` under `cost` on ranks that share `processors`, such as processes on the cores of one
    machine. Whatever runs at the same time gets the same share of them, and never more than one processor. The times of
    `cost` are those of a rank that has a processor alone; transfers need none. All else is as in `simulate`.

    Raises ScheduleError and UsageError as `simulate` does.
    """
    require_costs(schedule, cost)
    rows, order = run(schedule, cost, processors)
    require_end(schedule, order)
    return Timeline.of(schedule, rows, cost)


def run(schedule: Schedule, cost: CostModel, processors: float = inf) -> tuple[tuple[Row, ...], Order]:
    """Per rank its spans in the order of their starts, as far as `schedule` runs; and its order, which says where ranks
    are stuck. Raises ScheduleError as `Order` does.
    """
    order = Order(schedule, routes_among(schedule.placement.num_stages, cost.route_bytes))
    moved = transfers(schedule, cost, order)
    there = [inf] * len(moved)
    clock: Iterable[Ran] = unlimited(order, there, cost.durations, cost.overlap, cost.varied)
    if processors < inf or (cost.copy_groups and schedule.streams & COPIES) or _waits_for_joint(schedule):
        clock = SharedClock(schedule, cost, processors, order, there, moved)
    return loop(clock, there, moved, len(schedule.rows)), order


def _waits_for_joint(schedule: Schedule) -> bool:
    """Whether a computation waits for what a joint action on another stream makes."""
    flows = [DATAFLOW[kind] for kind in schedule.kinds]
    made = {content for flow in flows if flow.joint for content, _ in flow.makes}
    return any(content in made for flow in flows if flow.stream is Stream.COMPUTE for content, _ in flow.needs)


def require_costs(schedule: Schedule, cost: CostModel) -> None:
    """Raises UsageError for costs with another number of stages or microbatches than the schedule."""
    stages = schedule.placement.num_stages
    if len(cost.forward) != stages:
        raise UsageError(
            f"the cost model has {len(cost.forward)} stages, schedule {schedule.name!r} has {stages}: give one cost "
            "per stage, as CostModel.even(schedule.placement) does"
        )
    require_factors(cost.microbatch_factors, schedule.num_microbatches)


def require_end(schedule: Schedule, order: Order) -> None:
    """Raises ScheduleError if the iteration over `order` ended before the rows of the schedule."""
    if order.stuck:
        entries = ", ".join(f"rank {rank} at {schedule.rows[rank][position]}" for rank, position in order.stuck[:8])
        raise ScheduleError(
            f"schedule {schedule.name!r} cannot run to its end: these ranks are stuck: {entries}; see verify()"
        )
