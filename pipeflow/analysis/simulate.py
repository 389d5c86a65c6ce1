"""Simulate: when every action would run. An action starts when its values are there and its stream is free."""

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
from pipeflow.core.span import Span
from pipeflow.core.timeline import Timeline


def simulate(schedule: Schedule, cost: CostModel | None = None) -> Timeline:
    """The timeline of `schedule` under `cost` (by default 1 for F, 1 for each half of a backward, transfers free).

    A value made on another rank arrives a transfer after its maker ends. Transfers overlap computation, and those on
    other links; from one rank to another values go one after the other, each when the one before it has left. So the
    bytes of a link take turns, its latencies pass at once. What passes on a route is waited for where the costs say how
    large it is. A full backward is seen by its neighbour only when whole. A
    pair starts when both of its actions have what they need, takes what `CostModel.pair` says, and is seen by others
    when whole; run one half after the other, a schedule is `schedule.without_pairs()`.

    What runs beside computations starts when its rank reaches it, its values are there, and what was begun before it on
    its stream has ended; a reduction, when all of this is so on all ranks that hold its stage. It does not hold up its
    rank; the step ends when all is done.

    Raises ScheduleError when the schedule cannot run to its end (`verify` says why), and UsageError for costs of
    another number of stages.
    """
    cost = CostModel.even(schedule.placement) if cost is None else cost
    require_costs(schedule, cost)
    durations = {(kind, stage): cost.duration(kind, stage) for kind in Kind for stage in range(len(cost.forward))}
    order = Order(schedule, routes_among(schedule.placement.num_stages, cost.route_bytes))
    transfers = [each for end in order.ends for each in _transfers(schedule, cost, end)]
    delays, holding = [each.latency for each in transfers], [each if each.held else None for each in transfers]
    made = [0.0] * len(transfers)  # per value, when it exists, or has left for another rank
    maker = [0] * len(transfers)  # per value, on which rank
    left: defaultdict[tuple[int, int], float] = defaultdict(float)  # per link, when the last value has left
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
                end = free[rank] = start + durations[action.kind, action.stage]
            elif DATAFLOW[action.kind].joint:
                reached.append(_Reached(start, rank, action))
                continue
            else:
                start = max(start, beside[rank, stream])
                end = beside[rank, stream] = start + durations[action.kind, action.stage]
            spans[rank].append(Span(action, rank, start, end))
        else:
            pair = _paired(actions[0], actions[1], rank, start, cost)
            spans[rank] += pair
            end = free[rank] = pair[1].end
        for value in makes:
            made[value] = end
            maker[value] = rank
            if (holds := holding[value]) is not None:
                made[value] = left[holds.link] = max(left[holds.link], end) + holds.held
    if order.stuck:
        entries = ", ".join(f"rank {rank} at {schedule.rows[rank][position]}" for rank, position in order.stuck[:8])
        raise ScheduleError(f"schedule {schedule.name!r} cannot run to its end: stuck are {entries}; see verify()")
    for span in _joint(reached, cost, beside):
        spans[span.rank].append(span)
    rows = (sorted(row, key=attrgetter("start")) for row in spans) if reached or beside else spans
    memory = cost.saved_bytes, cost.deferred_bytes, cost.kept_bytes
    return Timeline(schedule.name, schedule.placement, tuple(map(tuple, rows)), *memory)


def require_costs(schedule: Schedule, cost: CostModel) -> None:
    """Raises UsageError for costs of another number of stages."""
    stages = schedule.placement.num_stages
    if len(cost.forward) != stages:
        raise UsageError(
            f"the cost model has {len(cost.forward)} stages, schedule {schedule.name!r} has {stages}: give one cost "
            "per stage, as CostModel.even(schedule.placement) does"
        )


_BESIDE = {kind: flow.stream for kind, flow in DATAFLOW.items() if flow.stream is not Stream.COMPUTE}


class _Reached(NamedTuple):
    """When a rank comes to a joint action in its row."""

    time: float
    rank: int
    action: Action


def _joint(reached: list[_Reached], cost: CostModel, free: defaultdict[tuple[int, Stream], float]) -> Iterator[Span]:
    """The spans of what several ranks do together: that of a stage at once on all ranks that hold it, and one at a time
    on a stream, in the order in which the last rank comes to them.
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


def _paired(forward: Action, backward: Action, rank: int, start: float, cost: CostModel) -> tuple[Span, Span]:
    """The spans of a pair: one after the other, each as much shorter as the pair is than the sum of the two."""
    first, second = cost.duration(forward.kind, forward.stage), cost.duration(backward.kind, backward.stage)
    whole = cost.pair(forward.stage, backward.kind, backward.stage)
    middle = start + (whole * first / (first + second) if first + second else 0.0)
    return Span(forward, rank, start, middle, backward), Span(backward, rank, middle, start + whole, forward)


class _Transfer(NamedTuple):
    """How a value gets to its user: it holds the link for a while, and arrives a latency after that."""

    link: tuple[int, int]
    held: float = 0.0
    latency: float = 0.0


def _transfers(schedule: Schedule, cost: CostModel, end: End) -> list[_Transfer]:
    """Per microbatch; a gradient is as large as the activation it belongs to."""
    paths, source, target = schedule.placement.paths, *sorted((end.stage, end.of(0).user))
    route = None if end.to is None else Route(source, target)
    by_path = []
    for path in paths:
        link = path[end.stage], path[end.of(0).user]
        stays = source == target or link[0] == link[1]
        costs = (0.0, 0.0) if stays else (cost.holding(source, *link, route), cost.link(*link).latency)
        by_path.append(_Transfer(link, *costs))
    return [by_path[microbatch % len(paths)] for microbatch in range(schedule.num_microbatches)]
