"""Recomputation: a schedule in which stages keep only their inputs, and compute their forwards again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.core.several import numbers_of


def with_recompute(schedule: Schedule, stages: Iterable[int] | None = None) -> Schedule:
    """`schedule` with a recomputation (C) directly before the backward of each microbatch on these stages, so that
    until then the stage keeps only its input. A forward whose backward comes directly after it is not computed again.
    Actions that are recomputed already stay as they are. The result is sound if `schedule` is.

    Args:
        schedule: a schedule with backwards.
        stages: the stages to recompute. None: all.

    Raises UsageError for a stage that does not exist.

    >>> from pipeflow import make_schedule
    >>> print(with_recompute(make_schedule("gpipe", ranks=2, microbatches=2), stages=[0]))
    rank 0: 0F0 0F1 0C0 0B0 0C1 0B1
    rank 1: 1F0 1F1 1B0 1B1
    """
    require_schedule(schedule)
    among = stages_among(schedule.placement, stages)
    rows = tuple(tuple(_recomputed(row, among)) for row in schedule.rows)
    return replace(schedule, name=f"{schedule.name} with recompute", rows=rows)


def stages_among(placement: Placement, stages: Iterable[int] | None) -> frozenset[int]:
    """The stages, or all of a placement. Raises UsageError for a stage that does not exist."""
    known = range(placement.num_stages)
    stages = known if stages is None else numbers_of("stages", stages)
    if wrong := sorted({*stages} - {*known}):
        raise UsageError(f"there is no stage {wrong[0]}: the schedule has stages 0 to {len(known) - 1}")
    return frozenset(stages)


def _recomputed(row: tuple[Entry, ...], stages: frozenset[int]) -> Iterator[Entry]:
    has = {(action.stage, action.microbatch) for entry in row for action in actions_of(entry) if action.kind is Kind.C}
    last: Entry | None = None
    for entry in row:
        for action in actions_of(entry):
            place = action.stage, action.microbatch
            is_first = action.kind in (Kind.B, Kind.I) and action.stage in stages
            if is_first and place not in has and last != Action(Kind.F, *place):
                yield Action(Kind.C, *place)
        yield entry
        last = entry
