"""Reductions: what is wrong with those of a schedule. What must not live here: when they run."""

from __future__ import annotations

from collections.abc import Iterator

from pipeflow.core.action import Action, Entry, Kind
from pipeflow.core.reductions import Last, is_reduction, last_weight_gradients
from pipeflow.core.schedule import Schedule
from pipeflow.core.violation import Violation


def wrong_reductions(schedule: Schedule) -> Iterator[Violation]:
    """Every violation of the reductions of `schedule`, at most one for each of those whose stage and microbatch exist.

    A schedule reduces no stage, or each one, once on each rank that makes weight gradients of it: where one rank did
    not take part, the others would wait for it, and where one stage was left out, its copies would drift apart. A
    reduction stands after all of its stage's weight gradients on its rank, and names the microbatch of the last one.
    """
    if not any(is_reduction(entry) for row in schedule.rows for entry in row):
        return
    stages, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    for rank, row in enumerate(schedule.rows):
        last = last_weight_gradients(row)
        seen: set[int] = set()
        for position, entry in enumerate(row):
            if not is_reduction(entry):
                continue
            wanted = _wanted(row, position, entry, last.get(entry.stage), entry.stage in seen)
            if wanted and entry.stage < stages and entry.microbatch < microbatches:
                yield Violation(f"{entry} is wrong here", wanted, rank, position)
            seen.add(entry.stage)
        for stage, (position, microbatch) in last.items():
            if stage not in seen:
                wanted = f"{Action(Kind.R, stage, microbatch)} after {row[position]}, since others are"
                yield Violation(f"stage {stage} is not reduced", wanted, rank)


def _wanted(row: tuple[Entry, ...], position: int, reduction: Action, last: Last | None, again: bool) -> str | None:
    """What should be in place of a reduction; None where it is right."""
    if last is None:
        return "reductions of stages alone that have weight gradients on this rank"
    if again:
        return "one reduction of a stage on a rank"
    if position < last.position:
        return f"it after {row[last.position]}, the last weight gradient of its stage"
    if reduction.microbatch != last.microbatch:
        right = Action(Kind.R, reduction.stage, last.microbatch)
        return f"{right}, after the last weight gradient of its stage"
    return None
