"""Simulate: when every action would run; of a schedule that may be unsound, as far as it runs; and the time of a whole
step, in which all ranks agree at the end that it is over. An action starts when its values have arrived and its stream
is free. Must not contain: costs, and the order in which actions can run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import final

from pipeflow.core.action import Action, Entry, actions_of
from pipeflow.core.analysis.event_loop import Ran, SharedClock, loop, transfers, unlimited
from pipeflow.core.analysis.order import Order, Stuck, Turn
from pipeflow.core.bruck import rounds
from pipeflow.core.cost import CostModel, require_cost_model, require_factors
from pipeflow.core.dataflow import COPIES, DATAFLOW, Stream
from pipeflow.core.errors import ScheduleError, UsageError
from pipeflow.core.route import routes_among
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.core.timeline import Row, Timeline, require_timeline


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
    require_cost_model(cost)
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


@final
@dataclass(frozen=True)
class Draft:
    """The timeline of a schedule that may be unsound.

    Attributes:
        timeline: the simulation as far as it goes. After its end, it has for each rank the actions that cannot run, in
            the order of the row.
        places: per rank and span of `timeline`, the index of the entry in the rank's row.
        stuck: where ranks wait for ever: the entries of `Order.stuck`, and the first action that belongs on another
            rank.
    """

    timeline: Timeline
    places: tuple[tuple[int, ...], ...]
    stuck: tuple[Stuck, ...]

    def first_stuck(self, rank: int) -> int | None:
        """The index of the first span of `rank` that does not run; None if all run."""
        position = next((each.position for each in self.stuck if each.rank == rank), None)
        return None if position is None else self.places[rank].index(position)


def draft(schedule: Schedule, cost: CostModel) -> Draft:
    """Draws up any schedule. A rank stops at the first action that does not exist or whose stage it does not hold. The
    other ranks stop where they wait for a value that this rank does not make. For a sound schedule the timeline is that
    of `simulate`.

    Raises UsageError for costs with another number of stages.
    """
    require_costs(schedule, cost)
    own = tuple(tuple(_own(schedule, rank)) for rank in range(len(schedule.rows)))
    rows, order = run(replace(schedule, rows=own), cost)
    waiting = {each.rank: each for each in order.waiting}
    foreign = {
        rank: Stuck(rank, len(mine), None)
        for rank, (mine, row) in enumerate(zip(own, schedule.rows, strict=True))
        if len(mine) < len(row)
    }
    stuck = dict(sorted((foreign | waiting).items()))
    end = max((span.end for row in rows for span in row), default=0.0)
    behind = _behind(schedule, {each.rank: each.position for each in stuck.values()}, end, cost)
    rows = tuple((*row, *more) for row, more in zip(rows, behind, strict=True))
    places = tuple(tuple(_places(*each)) for each in zip(rows, schedule.rows, strict=True))
    return Draft(Timeline.of(schedule, rows, cost), places, tuple(stuck.values()))


def _own(schedule: Schedule, rank: int) -> Iterator[Entry]:
    """The entries of a row before the first that its rank cannot run."""
    stages, paths = schedule.placement.num_stages, schedule.placement.paths
    for entry in schedule.rows[rank]:
        for action in actions_of(entry):
            if action.stage >= stages or action.microbatch >= schedule.num_microbatches:
                return
            if paths[action.microbatch % len(paths)][action.stage] != rank:
                return
        yield entry


def _behind(schedule: Schedule, positions: Mapping[int, int], time: float, cost: CostModel) -> tuple[Row, ...]:
    """Per rank the spans of its entries from its position on: they begin at `time`, wait for no values and for no other
    ranks. An action of a stage that does not exist takes the time of the last stage.
    """
    turns = [
        Turn(rank, actions_of(entry), [], [])
        for rank, position in positions.items()
        for entry in schedule.rows[rank][position:]
    ]
    stages, last = {action.stage for turn in turns for action in turn.actions}, len(cost.forward) - 1
    durations = {kind: {stage: times[min(stage, last)] for stage in stages} for kind, times in cost.durations.items()}
    clock = unlimited(turns, [], durations, cost.overlap, joint=False, begin=time)
    return loop(clock, [], [], len(schedule.rows))


def _places(spans: Row, row: tuple[Entry, ...]) -> Iterator[int]:
    """Per span, the index of its entry. Equal actions run in the order of their row."""
    found: defaultdict[Action, deque[int]] = defaultdict(deque)
    for position, entry in enumerate(row):
        for action in actions_of(entry):
            found[action].append(position)
    return (found[span.action].popleft() for span in spans)


def step_time(timeline: Timeline, cost: CostModel) -> float:
    """The time from the start of a step until its last rank continues: the makespan, plus the agreement at the end.

    When a rank has finished its row, it posts the receives of all rounds of the agreement. In each round it sends its
    results to one rank and waits for the results of another rank. A message leaves when its rank has it and knows that
    the receiver has posted its receive. The rank knows this one latency after the post. The message then takes another
    latency to arrive. Messages are so short that their bytes do not count.

    Two ranks end at 11 and at 10, with a latency of 1. Rank 1 knows at 12 of the receive that rank 0 posts at 11, and
    its message arrives at 13:

    >>> from pipeflow import CostModel, make_schedule, simulate
    >>> schedule = make_schedule("gpipe", ranks=2, microbatches=1)
    >>> cost = CostModel((5, 4), (0, 0), (0, 0), latency=1)
    >>> timeline = simulate(schedule, cost)
    >>> timeline.makespan, step_time(timeline, cost)
    (11.0, 13.0)
    """
    require_timeline(timeline)
    require_cost_model(cost)
    ends = [max((span.end for span in row), default=0.0) for row in timeline.rows]
    size, now, gone = len(ends), list(ends), list(ends)
    for distance, _ in rounds(size):
        leaves = []
        for rank, time in enumerate(now):
            to = (rank - distance) % size
            leaves.append(max(time, ends[to] + cost.link(to, rank).latency))
        sources = [(rank + distance) % size for rank in range(size)]
        now = [max(now[rank], leaves[source] + cost.link(source, rank).latency) for rank, source in enumerate(sources)]
        gone = [max(pair) for pair in zip(gone, leaves, strict=True)]
    return max((*now, *gone), default=0.0)
