"""Places: the stages that no name says. Must not contain: steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeflow.core.action import Action, Kind
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.families import schedules_on
from pipeflow.traces.recorded import RecordedAction
from pipeflow.traces.steps import Step


def give_stages(steps: Sequence[Step]) -> None:
    """Gives each action its stage, if names do not say it. Usually that is its rank. If a named schedule of several
    stages per rank, and none of one, has forwards and backwards in the order that was recorded, it gives the stages.
    """
    nameless = [own for step in steps for own in step if any(each.named.stage is None for each in own)]
    if not nameless:
        return
    fitting = _fitting(steps[0])
    for step in steps:
        for rank, own in enumerate(step):
            actions = None if fitting is None else list(fitting.actions(rank))
            for place, each in enumerate(own):
                if actions is None:
                    each.named = each.named._replace(stage=rank)
                else:
                    each.named = each.named._replace(stage=actions[place].stage, microbatch=actions[place].microbatch)


def _fitting(step: Step) -> Schedule | None:
    """The schedule of several stages per rank that a step shows, if it does."""
    kinds = [[each.kind for each in own] for own in step]
    forwards = kinds[0].count(Kind.F)
    for chunks in (each for each in range(1, forwards + 1) if forwards % each == 0):
        for placement in _placements(len(step), chunks):
            for schedule in schedules_on(placement, forwards // chunks):
                rows = [list(schedule.actions(rank)) for rank in range(len(step))]
                if [[each.kind for each in row] for row in rows] == kinds and all(map(_agrees, step, rows)):
                    return schedule if chunks > 1 else None
    return None


def _placements(ranks: int, chunks: int) -> Iterator[Placement]:
    yield Placement.looped(ranks, chunks)
    if chunks == 2 and ranks > 1:
        yield Placement.vee(ranks)


def _agrees(own: Sequence[RecordedAction], row: Sequence[Action]) -> bool:
    """Whether backwards belong to the same forwards in a schedule, where operators show these."""
    forwards: dict[int | None, tuple[int, int]] = {}
    for each, action in zip(own, row, strict=True):
        place = action.stage, action.microbatch
        if each.index is not None and forwards.setdefault(each.index, place) != place:
            return False
    return True
