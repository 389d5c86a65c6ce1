"""Optimizer steps in a schedule: each rank steps the weights of its stages when its other actions are done, and waits
for no other rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from pipeflow.core.action import Action, Entry, Kind
from pipeflow.core.rows import last_made
from pipeflow.core.schedule import Schedule, require_schedule


def with_optimizer_step(schedule: Schedule) -> Schedule:
    """`schedule` with the optimizer's step (S) of each stage at the end of its rank's row. Stages that have one keep
    theirs. A schedule without backwards is returned as it is. The result is sound if `schedule` is.

    A rank then starts the next step when its own row has ended, as in zero-bubble papers (arXiv 2401.10241, section 4).
    Steps follow each other after `Timeline.span`, not after `Timeline.makespan`. To train with it, make a
    `pipeflow.PipelinedOptimizer`.

    >>> from pipeflow import make_schedule
    >>> print(with_optimizer_step(make_schedule("zb-h1", ranks=2, microbatches=1)))
    rank 0: 0F0 0I0 0W0 0S0
    rank 1: 1F0 1I0 1W0 1S0
    """
    require_schedule(schedule)
    if schedule.is_forward_only:
        return schedule
    rows = []
    for row in schedule.rows:
        have = {entry.stage for entry in row if _steps(entry)}
        last = sorted(last_made(row).items(), key=lambda each: each[1].position)
        rows.append((*row, *(Action(Kind.S, stage, made.microbatch) for stage, made in last if stage not in have)))
    return replace(schedule, rows=tuple(rows))


def without_optimizer_step(schedule: Schedule) -> Schedule:
    """`schedule` without the optimizer's steps. It is sound if `schedule` is."""
    rows = (tuple(entry for entry in row if not _steps(entry)) for row in schedule.rows)
    return replace(schedule, rows=tuple(rows))


def _steps(entry: Entry) -> TypeGuard[Action]:
    return isinstance(entry, Action) and entry.kind is Kind.S
