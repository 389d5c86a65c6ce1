"""Verify: everything that is wrong with a schedule, with place and reason. Must not contain: checks of sends and
receives, which `programs` has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from pipeflow.core.action import Action, Kind, actions_of
from pipeflow.core.analysis.memory_cap import MemoryCap
from pipeflow.core.dataflow import DATAFLOW, SEVERAL
from pipeflow.core.errors import Violation
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.core.soundness.joint import wrong_joint
from pipeflow.core.soundness.lasting import wrong_lasting
from pipeflow.core.soundness.memory import over_cap
from pipeflow.core.soundness.missing_actions import nearest, ways_of
from pipeflow.core.soundness.programs import verify_programs
from pipeflow.core.soundness.stuck import deadlocks_besides, deadlocks_of
from pipeflow.core.soundness.waiting_cycles import Place
from pipeflow.core.text import listed

__all__ = ["Violation", "verify", "verify_programs"]

Ran = dict[tuple[int, int], list[tuple[Kind, int, int]]]  # (stage, microbatch) -> (kind, rank, position)


def verify(
    schedule: Schedule, *, memory_cap: MemoryCap | None = None, microbatch_factors: Sequence[float] = ()
) -> list[Violation]:
    """Every violation of `schedule`. An empty list proves that it is sound:

    - Every action is on the rank that holds its stage, and its stage and microbatch exist.
    - Every microbatch runs forward once on every stage, and backward once, whole or in two halves. Or the schedule has
      only forwards. Every value that an action keeps is used by another action.
    - Either no stage is reduced, or each stage is reduced once on each rank that makes weight gradients of it. The
      reduction comes after the last of these gradients, and has its microbatch.
    - If weights of a stage are gathered, all computations of the stage on that rank run while they are whole, and what
      is gathered is freed.
    - No rank waits for ever: the order has no cycle. For this check, actions in a wrong place are left out and missing
      actions count as present, so each cycle is a separate violation. Of deadlocks that hide one
      behind the other, the first twenty are found.
    - With a `memory_cap`, no rank keeps more activations than that, counted as in `Timeline.peak_activations`.

    Args:
        schedule: the schedule to check.
        memory_cap: one number or one per rank, in microbatches of a rank's whole share of the model. None: not checked.
        microbatch_factors: how much each microbatch keeps, as in `CostModel`. Empty: all keep the same.

    Raises UsageError if `memory_cap` is not positive, or if it has several numbers but not one per rank. Also raises it
    for another number of factors than microbatches.
    """
    require_schedule(schedule)
    ran: Ran = {}
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            for action in actions_of(entry):
                ran.setdefault((action.stage, action.microbatch), []).append((action.kind, rank, position))
    violations = [*_foreign(schedule, ran), *_misplaced(schedule, ran), *_not_once(schedule, ran)]
    violations += [*wrong_joint(schedule), *wrong_lasting(schedule)]
    violations += deadlocks_besides(schedule) if violations else deadlocks_of(schedule)
    return violations if memory_cap is None else [*violations, *over_cap(schedule, memory_cap, microbatch_factors)]


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
    ways = ((Kind.F,),) if schedule.is_forward_only else ways_of(schedule)
    wanted = [frozenset(kinds) for kinds in ways]
    for stage in range(schedule.placement.num_stages):
        for microbatch in range(schedule.num_microbatches):
            runs = [run for run in ran.get((stage, microbatch), ()) if run[0] not in SEVERAL]
            seen: dict[Kind, Place] = {}
            for kind, rank, position in runs:
                if kind in seen:
                    again = f"{Action(kind, stage, microbatch)} runs again"
                    yield Violation(again, "every action once", rank, position, earlier=seen[kind])
                seen[kind] = rank, position
            if seen.keys() not in wanted:
                holder = schedule.placement.rank_of(stage, microbatch)
                way = nearest(seen.keys(), ways)
                problem = _incomplete(seen.keys(), way, stage, microbatch)
                yield Violation(problem, listed(way), holder, incomplete=(stage, microbatch))


def _incomplete(seen: Set[Kind], way: Sequence[Kind], stage: int, microbatch: int) -> str:
    """The faults of the actions of a microbatch on a stage, compared with the `way` that they should follow."""

    def said(kinds: Sequence[Kind]) -> str:
        return listed([str(Action(kind, stage, microbatch)) for kind in kinds])

    has = [kind for kind in Kind if kind in seen]
    lacking, surplus = [kind for kind in way if kind not in has], [kind for kind in has if kind not in way]
    parts = [f"{said(lacking)} {'is' if len(lacking) == 1 else 'are'} missing"] * bool(lacking)
    parts += [f"{said(surplus)} should not be there"] * bool(surplus)
    return f"{', and '.join(parts)}: stage {stage} runs {said(has) or 'nothing'} for microbatch {microbatch}"
