"""Orders: pipeflow's schedules as torch's tables of actions, and such tables as schedules. Must not contain: stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch.distributed.pipelining.schedules import _Action, _ComputationType

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import make_schedule
from pipeflow.schedules.families import FAMILIES, sizes_on

Actions = Mapping[int, Sequence[Any]]
"""Per rank, actions of torch, and None where it waits."""

_KINDS = {
    Kind.F: _ComputationType.FORWARD,
    Kind.B: _ComputationType.FULL_BACKWARD,
    Kind.I: _ComputationType.BACKWARD_INPUT,
    Kind.W: _ComputationType.BACKWARD_WEIGHT,
}
_COMPUTATIONS = {*_KINDS.values(), _ComputationType.OVERLAP_F_B}
_UNSHARDS = {_ComputationType.UNSHARD, _ComputationType.RESHARD}


@lru_cache(maxsize=64)
def order_of(name: str, ranks: int, stages: int, microbatches: int) -> dict[int, list[Any]]:
    """The actions of each rank under a schedule of pipeflow with this number of stages in all. Raises UsageError if it
    has no such size, and for one whose stages have copies on two ranks.
    """
    for options in sizes_on(FAMILIES[name], Placement.looped(ranks, max(stages // ranks, 1))):
        try:
            [path] = make_schedule(name, ranks=ranks, microbatches=1, **options).placement.paths
        except ValueError:  # it has no such size, or two paths
            continue
        if len(path) == stages:
            schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, **options)
            return {rank: [_action(entry) for entry in row] for rank, row in enumerate(schedule.rows)}
    raise UsageError(f"schedule {name!r} does not run {stages} stages on {ranks} ranks, each stage on one of them")


def _action(entry: Entry) -> Any:
    """An entry of a schedule as torch's action."""
    if isinstance(entry, Action):
        return _Action(entry.stage, _KINDS[entry.kind], entry.microbatch)
    return _Action(-1, _ComputationType.OVERLAP_F_B, None, tuple(map(_action, actions_of(entry))))


def schedule_of(
    actions: Actions, stage_to_rank: Mapping[int, int], microbatches: int, name: str, *, unshards: bool = False
) -> Schedule:
    """The schedule of a table of actions. Idle time, transfers and reductions are left out, because pipeflow derives
    them; unshards and reshards stay only with `unshards`, for stages under fully_shard. Raises UsageError for a table
    without actions, and ScheduleError for one that cannot be read.
    """
    if not actions:
        raise UsageError(f"{name} has no order yet: set pipeline_order, or load one with _load_csv")
    kinds = _COMPUTATIONS | (_UNSHARDS if unshards else set())
    kept = [
        [str(action) for action in actions[rank] if action is not None and action.computation_type in kinds]
        for rank in sorted(actions)
    ]
    placement = Placement((tuple(stage_to_rank[stage] for stage in sorted(stage_to_rank)),))
    return Schedule.from_csv("\n".join(map(",".join, kept)), placement, microbatches, name=name)
