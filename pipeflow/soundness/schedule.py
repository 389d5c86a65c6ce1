"""Verify: everything that is wrong with a schedule, with place and reason. Must not contain: checks of sends and
receives, which `programs` has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeflow.analysis.memory_cap import MemoryCap
from pipeflow.analysis.order import Order
from pipeflow.core.action import Action, Kind, actions_of
from pipeflow.core.dataflow import DATAFLOW, WHOLE
from pipeflow.core.schedule import Schedule
from pipeflow.core.violation import Violation
from pipeflow.soundness.deadlock import Place
from pipeflow.soundness.joint import wrong_joint
from pipeflow.soundness.memory import over_cap
from pipeflow.soundness.programs import verify_programs
from pipeflow.soundness.waits import cycles, waits

__all__ = ["Violation", "verify", "verify_programs"]

Ran = dict[tuple[int, int], list[tuple[Kind, int, int]]]  # (stage, microbatch) -> (kind, rank, position)


def verify(schedule: Schedule, *, memory_cap: MemoryCap | None = None) -> list[Violation]:
    """Every violation of `schedule`. An empty list proves that it is sound:

    - Every action is on the rank that holds its stage, and its stage and microbatch exist.
    - Every microbatch runs forward once on every stage, and backward once, whole or in two halves; or the schedule has
      forwards alone. What one action keeps another one uses.
    - No stage is reduced; or each stage is, once on each rank that makes weight gradients of it, after the last of
      these, and with its microbatch.
    - No rank waits for ever: the order has no cycle. This is checked only if nothing above is wrong.
    - With a `memory_cap`, no rank keeps more activations than that, counted as in `Timeline.peak_activations`.

    Args:
        schedule: the schedule to check.
        memory_cap: one number or one per rank, in microbatches of a rank's whole share of the model. None: not checked.

    Raises UsageError unless `memory_cap` is positive, and has one number per rank if it has several.
    """
    ran: Ran = {}
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            for action in actions_of(entry):
                ran.setdefault((action.stage, action.microbatch), []).append((action.kind, rank, position))
    violations = [*_foreign(schedule, ran), *_misplaced(schedule, ran), *_not_once(schedule, ran)]
    violations += wrong_joint(schedule)
    violations = violations or list(_deadlock(schedule))
    return violations if memory_cap is None else [*violations, *over_cap(schedule, memory_cap)]


def _foreign(schedule: Schedule, ran: Ran) -> Iterator[Violation]:
    stages, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    for stage, microbatch in ran:
        if stage < stages and microbatch < microbatches:
            continue
        among = f"stages 0..{stages - 1} and microbatches 0..{microbatches - 1}"
        for kind, rank, position in ran[stage, microbatch]:
            yield Violation(f"{Action(kind, stage, microbatch)} does not exist", among, rank, position)


def _misplaced(schedule: Schedule, ran: Ran) -> Iterator[Violation]:
    stages, paths = schedule.placement.num_stages, schedule.placement.paths
    for (stage, microbatch), runs in ran.items():
        if stage >= stages:
            continue
        holder = paths[microbatch % len(paths)][stage]
        for kind, rank, position in runs:
            if rank != holder and not DATAFLOW[kind].joint:
                wants = f"it on rank {holder}, which holds its stage"
                yield Violation(f"{Action(kind, stage, microbatch)} is on rank {rank}", wants, rank, position)


def _not_once(schedule: Schedule, ran: Ran) -> Iterator[Violation]:
    whole = ((Kind.F,),) if schedule.is_forward_only else WHOLE
    wanted = [frozenset(kinds) for kinds in whole]
    for stage in range(schedule.placement.num_stages):
        for microbatch in range(schedule.num_microbatches):
            runs = [run for run in ran.get((stage, microbatch), ()) if not DATAFLOW[run[0]].joint]
            seen: dict[Kind, Place] = {}
            for kind, rank, position in runs:
                if kind in seen:
                    again = f"{Action(kind, stage, microbatch)} runs again"
                    yield Violation(again, "every action once", rank, position, earlier=seen[kind])
                seen[kind] = rank, position
            if seen.keys() not in wanted:
                has = ", ".join(str(Action(kind, stage, microbatch)) for kind in sorted(seen)) or "nothing"
                wants = "its forward alone" if schedule.is_forward_only else ", or ".join(map(_listed, WHOLE))
                holder = schedule.placement.rank_of(stage, microbatch)
                problem = f"stage {stage} runs {has} for microbatch {microbatch}"
                yield Violation(problem, wants, holder, incomplete=(stage, microbatch))


def _listed(kinds: Sequence[Kind]) -> str:
    """The kinds as text, as in "F, I and W"."""
    *first, last = kinds
    return f"{', '.join(first)} and {last}"


def _deadlock(schedule: Schedule) -> Iterator[Violation]:
    order = Order(schedule)
    for _ in order:
        pass
    yield from cycles(schedule, waits(schedule, order.waiting))
