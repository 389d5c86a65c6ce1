"""Simulate: when every action would run. An action starts when its values are there and its stream is free. Must not
contain: costs, and the order in which actions can run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from pipeflow.analysis.order import Order
from pipeflow.core.action import Action, Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import DATAFLOW, End, Stream
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.route import Route, routes_among
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline


def simulate(schedule: Schedule, cost: CostModel | None = None) -> Timeline:
    """The timeline of `schedule` under `cost`.

    Transfers: a value from another rank arrives one transfer after the action that made it ends. Transfers overlap with
    computation, and with transfers on other links. On one link, values occupy the link one after the other, and each
    one's latency runs beside the next. Values on a route are waited for only if the costs have their size.

    Backwards and pairs: another rank sees the gradient of a full backward only when the whole backward has ended. A
    pair starts when both of its actions have their values, takes the time of `CostModel.pair`, and is seen by others
    when both have ended. To run pairs one action after the other, simulate `schedule.without_pairs()`.

    Reductions, which run beside computations, start when their rank reaches them, their values are there and their
    stream is free, on all ranks that hold the stage. They do not hold up their rank. The step ends when everything has
    ended.

    Args:
        schedule: the schedule.
        cost: the costs. None: 1 for F, 1 for each half of a backward, and free transfers.

    Raises ScheduleError if the schedule cannot run to its end (`verify` says why), and UsageError for costs with
    another number of stages.
    """
    cost = CostModel.even(schedule.placement) if cost is None else cost
    require_costs(schedule, cost)
    rows, order = run(schedule, cost)
    require_end(schedule, order)
    return Timeline.of(schedule, rows, cost)


def run(schedule: Schedule, cost: CostModel) -> tuple[tuple[Row, ...], Order]:
    """Per rank its spans in the order of their starts, as far as `schedule` runs; and its order, which says where ranks
    are stuck. Raises ScheduleError as `Order` does.
    """
    order = Order(schedule, routes_among(schedule.placement.num_stages, cost.route_bytes))
    moved = [each for end in order.ends for each in transfers(schedule, cost, end)]
    delays, holding = [each.latency for each in moved], [each if each.held else None for each in moved]
    made = [0.0] * len(moved)  # per value, when it is made, or has left for another rank
    maker = [0] * len(moved)  # per value, the rank that made it
    left: defaultdict[tuple[int, int], float] = defaultdict(float)  # per link, when its last value has left
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    free = [0.0] * len(schedule.rows)
    beside: defaultdict[tuple[int, Stream], float] = defaultdict(float)  # when each other stream is free
    reached: list[_Reached] = []
    for rank, actions, needs, makes in order:
        start = free[rank]
        for value in needs:
            there = made[value] if maker[value] == rank else made[value] + delays[value]
            if there > start:
                start = there
        if len(actions) == 1:
            (action,) = actions
            stream = _BESIDE.get(action.kind)
            if stream is None:
                end = free[rank] = start + cost.durations[action.kind][action.stage]
            elif DATAFLOW[action.kind].joint:
                reached.append(_Reached(start, rank, action))
                continue
            else:
                start = max(start, beside[rank, stream])
                end = beside[rank, stream] = start + cost.durations[action.kind][action.stage]
            spans[rank].append(Span(action, rank, start, end))
        else:
            pair = paired(actions[0], actions[1], rank, start, cost)
            spans[rank] += pair
            end = free[rank] = pair[1].end
        for value in makes:
            made[value] = end
            maker[value] = rank
            if (holds := holding[value]) is not None:
                made[value] = left[holds.link] = max(left[holds.link], end) + holds.held
    for span in _joint(reached, cost, beside):
        spans[span.rank].append(span)
    rows = (sorted(row, key=attrgetter("start")) for row in spans) if reached or beside else spans
    return tuple(map(tuple, rows)), order


def require_costs(schedule: Schedule, cost: CostModel) -> None:
    """Raises UsageError for costs with another number of stages than the schedule."""
    stages = schedule.placement.num_stages
    if len(cost.forward) != stages:
        raise UsageError(
            f"the cost model has {len(cost.forward)} stages, schedule {schedule.name!r} has {stages}: give one cost "
            "per stage, as CostModel.even(schedule.placement) does"
        )


def require_end(schedule: Schedule, order: Order) -> None:
    """Raises ScheduleError if the iteration over `order` ended before the rows of the schedule."""
    if order.stuck:
        entries = ", ".join(f"rank {rank} at {schedule.rows[rank][position]}" for rank, position in order.stuck[:8])
        raise ScheduleError(f"schedule {schedule.name!r} cannot run to its end: stuck are {entries}; see verify()")


_BESIDE = {kind: flow.stream for kind, flow in DATAFLOW.items() if flow.stream is not Stream.COMPUTE}


class _Reached(NamedTuple):
    """The time at which a rank reaches a joint action in its row."""

    time: float
    rank: int
    action: Action


def _joint(reached: list[_Reached], cost: CostModel, free: defaultdict[tuple[int, Stream], float]) -> Iterator[Span]:
    """The spans of joint actions. All ranks that hold the stage run one at the same time. On one stream they run one at
    a time, in the order in which their last rank reaches them.
    """
    together: defaultdict[tuple[Kind, int], list[_Reached]] = defaultdict(list)
    for each in reached:
        together[each.action.kind, each.action.stage].append(each)
    for (kind, stage), joint in sorted(together.items(), key=lambda each: max(one.time for one in each[1])):
        stream = DATAFLOW[kind].stream
        start = max(max(time, free[rank, stream]) for time, rank, _ in joint)
        for _, rank, action in joint:
            free[rank, stream] = start + cost.duration(kind, stage)
            yield Span(action, rank, start, free[rank, stream])


def paired(forward: Action, backward: Action, rank: int, start: float, cost: CostModel) -> tuple[Span, Span]:
    """The two spans of a pair, one after the other, shortened in proportion so that together they take the time of the
    pair.
    """
    first, second = cost.duration(forward.kind, forward.stage), cost.duration(backward.kind, backward.stage)
    whole = cost.pair(forward.stage, backward.kind, backward.stage)
    middle = start + (whole * first / (first + second) if first + second else 0.0)
    return Span(forward, rank, start, middle, backward), Span(backward, rank, middle, start + whole, forward)


class Transfer(NamedTuple):
    """The transfer of a value to the rank that uses it: it occupies `link` for the time `held`, and arrives a `latency`
    later.
    """

    link: tuple[int, int]
    held: float = 0.0
    latency: float = 0.0


def transfers(schedule: Schedule, cost: CostModel, end: End) -> list[Transfer]:
    """The transfer of a value, per microbatch. A gradient is as large as the activation it belongs to."""
    paths, source, target = schedule.placement.paths, *sorted((end.stage, end.of(0).user))
    route = None if end.to is None else Route(source, target)
    by_path = []
    for path in paths:
        link = path[end.stage], path[end.of(0).user]
        stays = source == target or link[0] == link[1]
        costs = (0.0, 0.0) if stays else (cost.holding(source, *link, route), cost.link(*link).latency)
        by_path.append(Transfer(link, *costs))
    return [by_path[microbatch % len(paths)] for microbatch in range(schedule.num_microbatches)]
