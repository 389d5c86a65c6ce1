"""Draft: the timeline of a schedule that may be unsound, as far as it runs. Must not contain: what is wrong with it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

from pipeflow.analysis.event_loop import loop, unlimited
from pipeflow.analysis.order import Stuck, Turn
from pipeflow.analysis.simulation import require_costs, run
from pipeflow.core.action import Action, Entry, actions_of
from pipeflow.core.cost import CostModel
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Row
from pipeflow.core.timeline import Timeline


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
