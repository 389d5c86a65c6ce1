"""Draft: the timeline of a schedule that may be unsound, as far as it runs. Must not contain: what is wrong with it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import final

from pipeflow.analysis.order import Stuck
from pipeflow.analysis.simulate import paired, require_costs, run
from pipeflow.core.action import Action, Entry, actions_of
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.core.schedule import Schedule
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline


@final
@dataclass(frozen=True)
class Draft:
    """A schedule that may be unsound, in time.

    Attributes:
        timeline: the simulation as far as it goes. Behind it, from one time on, stands for each rank what it cannot
            run, in the order of its row.
        places: per rank and span of `timeline`, the index of the entry in the rank's row.
        stuck: where ranks wait for ever; the same as `Order.stuck`, and the first action that is not its rank's own.
    """

    timeline: Timeline
    places: tuple[tuple[int, ...], ...]
    stuck: tuple[Stuck, ...]

    def first_stuck(self, rank: int) -> int | None:
        """The index of the first span of `rank` that does not run; None if all run."""
        position = next((each.position for each in self.stuck if each.rank == rank), None)
        return None if position is None else self.places[rank].index(position)


def draft(schedule: Schedule, cost: CostModel) -> Draft:
    """Draws up any schedule. A rank stops at the first action whose stage it does not hold or that does not exist; the
    others stop where they wait for what that rank does not make. For a sound schedule the timeline is that of
    `simulate`.

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
    rows = tuple(
        (*row, *_behind(schedule.rows[rank][stuck[rank].position :], rank, end, cost)) if rank in stuck else row
        for rank, row in enumerate(rows)
    )
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


def _behind(entries: Sequence[Entry], rank: int, time: float, cost: CostModel) -> list[Span]:
    """The spans of entries from `time` on, each as soon as its stream is free."""
    last = len(cost.forward) - 1
    spans: list[Span] = []
    free: defaultdict[Stream, float] = defaultdict(lambda: time)
    for entry in entries:
        # an action of a stage that does not exist takes the time of the last stage
        known = [Action(each.kind, min(each.stage, last), each.microbatch) for each in actions_of(entry)]
        if len(known) > 1:
            one, other = paired(known[0], known[1], rank, free[Stream.COMPUTE], cost)
            first, second = actions_of(entry)
            spans += replace(one, action=first, partner=second), replace(other, action=second, partner=first)
            free[Stream.COMPUTE] = other.end
            continue
        stream = DATAFLOW[known[0].kind].stream
        start = max(free[stream], free[Stream.COMPUTE])
        free[stream] = start + cost.duration(known[0].kind, known[0].stage)
        spans.append(Span(actions_of(entry)[0], rank, start, free[stream]))
    return sorted(spans, key=attrgetter("start"))


def _places(spans: Row, row: tuple[Entry, ...]) -> Iterator[int]:
    """Per span, the index of its entry. Equal actions run in the order of their row."""
    found: defaultdict[Action, deque[int]] = defaultdict(deque)
    for position, entry in enumerate(row):
        for action in actions_of(entry):
            found[action].append(position)
    return (found[span.action].popleft() for span in spans)
