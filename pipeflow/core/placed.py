"""Placed: the placement that follows from rows, since a stage is on the rank in whose row it stands. Must not contain:
checks of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeflow.core.action import Entry, actions_of
from pipeflow.core.dataflow import SEVERAL
from pipeflow.core.errors import ScheduleError
from pipeflow.core.placement import Placement

Holders = dict[int, set[int]]  # per stage, the ranks whose rows contain it


def placement_of(rows: Sequence[Sequence[Entry]]) -> Placement | None:
    """The placement in which every action is in the row of its stage's rank. It has one path if each stage is in one
    row, otherwise two paths: microbatch m takes path m modulo 2.

    Returns None if there is no such placement: a stage has no action, a rank has no stage, or a stage is on more ranks.
    """
    return _with_paths(rows, 1) or _with_paths(rows, 2)


def _with_paths(rows: Sequence[Sequence[Entry]], number: int) -> Placement | None:
    """The placement with `number` paths, or None if the rows do not fit one."""
    holders: list[Holders] = [{} for _ in range(number)]
    for rank, row in enumerate(rows):
        for action in (action for entry in row for action in actions_of(entry)):
            if action.kind not in SEVERAL:  # those belong to no single microbatch
                holders[action.microbatch % number].setdefault(action.stage, set()).add(rank)
    stages = range(max((stage for path in holders for stage in path), default=-1) + 1)
    if any(len(path.get(stage, ())) != 1 for path in holders for stage in stages):
        return None
    try:
        placement = Placement(tuple(tuple(rank for stage in stages for rank in path[stage]) for path in holders))
    except ScheduleError:
        return None
    return placement if placement.num_ranks == len(rows) else None
