"""Reductions: what is wrong with those of a schedule. What must not live here: when they run."""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.analysis.violation import Violation
from pipeflow.core.action import Action, Kind, actions_of
from pipeflow.core.reductions import last_weight_gradients
from pipeflow.core.schedule import Schedule


def wrong_reductions(schedule: Schedule) -> Iterator[Violation]:
    """Every violation of the reductions of `schedule`, one at most for each.

    A schedule reduces no stage, or each one, once on each rank that makes weight gradients of it: where one rank did
    not take part, the others would wait for it, and where one stage was left out, its copies would drift apart. A
    reduction stands after all of its stage's weight gradients on its rank, and names the microbatch of the last one.
    """
    if not any(isinstance(entry, Action) and entry.kind is Kind.R for row in schedule.rows for entry in row):
        return
    for rank, row in enumerate(schedule.rows):
        missing = last_weight_gradients(row)
        last = dict(missing)
        for position, entry in enumerate(row):
            for action in actions_of(entry):
                if action.kind is not Kind.R:
                    continue
                if action.stage not in last:
                    wants = f"reductions of stages that have weight gradients on rank {rank}"
                elif missing.pop(action.stage, None) is None:
                    wants = "one reduction of a stage on a rank"
                elif position < last[action.stage].position:
                    wants = f"it after {row[last[action.stage].position]}, the last weight gradient of its stage"
                elif action.microbatch != last[action.stage].microbatch:
                    right = Action(Kind.R, action.stage, last[action.stage].microbatch)
                    wants = f"{right}, as the last weight gradient of its stage is {row[last[action.stage].position]}"
                else:
                    continue
                yield Violation(f"{action} is there", wants, rank, position)
        for stage, (position, microbatch) in missing.items():
            wants = f"{Action(Kind.R, stage, microbatch)} after {row[position]}, as others are reduced"
            yield Violation(f"stage {stage} is not reduced", wants, rank)
