"""Missing: the actions that a schedule lacks. Must not contain: where in a row they could stand."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import DATAFLOW, WHOLE
from pipeflow.core.schedule import Schedule


class Missing(NamedTuple):
    """An action that a schedule lacks, and the rank that holds its stage."""

    rank: int
    action: Action


def missing(schedule: Schedule) -> list[Missing]:
    """The actions that a step of training still needs, by rank and microbatch. A schedule of forwards alone lacks its
    backwards.

    A stage that has begun no backward of a microbatch lacks it in the form, whole or in halves, that most backwards of
    the schedule have. Reductions do not count.
    """
    stages, many = schedule.placement.num_stages, schedule.num_microbatches
    seen: dict[tuple[int, int], set[Kind]] = {}
    number: Counter[Kind] = Counter()
    for rank in range(len(schedule.rows)):
        for action in schedule.actions(rank):
            if not DATAFLOW[action.kind].joint:
                number[action.kind] += 1
                seen.setdefault((action.stage, action.microbatch), set()).add(action.kind)
    common = set.intersection(*map(set, WHOLE))
    forms = sorted(WHOLE, key=lambda kinds: -max(number[kind] for kind in kinds if kind not in common))
    found = []
    for microbatch in range(many):
        for stage in range(stages):
            has = seen.get((stage, microbatch), set())
            form = next((kinds for kinds in forms if has <= set(kinds)), ())
            rank = schedule.placement.rank_of(stage, microbatch)
            found += [Missing(rank, Action(kind, stage, microbatch)) for kind in form if kind not in has]
    return sorted(found, key=lambda each: each.rank)
