"""Placed: the placement that rows show, since each stage stands in the row of its rank. What must not live here:
whether the rows are sound.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeflow.core.action import Entry, actions_of
from pipeflow.core.dataflow import DATAFLOW
from pipeflow.core.errors import ScheduleError
from pipeflow.core.placement import Placement

Holders = dict[int, set[int]]  # per stage the ranks whose rows have it


def placement_of(rows: Sequence[Sequence[Entry]]) -> Placement | None:
    """The placement by which every action stands in the row of its stage's rank: with one path where each stage stands
    in one row, else with two, of which a microbatch takes the one of its number modulo 2. None where there is no such
    placement: a stage without an action, a rank without a stage, a stage on more ranks.
    """
    return _with_paths(rows, 1) or _with_paths(rows, 2)


def _with_paths(rows: Sequence[Sequence[Entry]], number: int) -> Placement | None:
    """The placement with so many paths, if the rows have one."""
    holders: list[Holders] = [{} for _ in range(number)]
    for rank, row in enumerate(rows):
        for action in (action for entry in row for action in actions_of(entry)):
            if not DATAFLOW[action.kind].joint:  # what all ranks of a stage do is no microbatch's
                holders[action.microbatch % number].setdefault(action.stage, set()).add(rank)
    stages = range(max((stage for path in holders for stage in path), default=-1) + 1)
    if any(len(path.get(stage, ())) != 1 for path in holders for stage in stages):
        return None
    try:
        placement = Placement(tuple(tuple(rank for stage in stages for rank in path[stage]) for path in holders))
    except ScheduleError:
        return None
    return placement if placement.num_ranks == len(rows) else None
