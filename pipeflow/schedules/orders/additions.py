"""Additions: a schedule with further actions: optimizer steps, recomputations, unshards, and what options ask for. Must
not contain: where offloads go, which follows from a simulation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import DATAFLOW, Content, Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import stages_among
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
        have = {action.stage for entry in row for action in actions_of(entry) if action.kind is Kind.S}
        last = sorted(last_made(row).items(), key=lambda each: each[1].position)
        rows.append((*row, *(made.used_by(Kind.S, stage) for stage, made in last if stage not in have)))
    return replace(schedule, rows=tuple(rows))


def without_optimizer_step(schedule: Schedule) -> Schedule:
    """`schedule` without the optimizer's steps. It is sound if `schedule` is."""
    return schedule.without(Kind.S)


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


def _recomputed(row: tuple[Entry, ...], stages: frozenset[int]) -> Iterator[Entry]:
    has = {action.work for entry in row for action in actions_of(entry) if action.kind is Kind.C}
    last: Entry | None = None
    for entry in row:
        for action in actions_of(entry):
            is_first = action.kind in (Kind.B, Kind.I) and action.stage in stages
            if is_first and action.work not in has and last != action.as_kind(Kind.F):
                yield action.as_kind(Kind.C)
        yield entry
        last = entry


WHOLE = 3
"""The most stages of a pipeline rank whose weights are whole at the same time: what `with_unshard` and torch allow."""


def with_unshard(
    schedule: Schedule, stages: Iterable[int] | None = None, *, most: int = WHOLE, ahead: int | None = None
) -> Schedule:
    """`schedule` with unshards (U), which gather the weights of a stage for all actions of the stage that follow, and
    reshards (H), which free them. At each computation, the weights of the next `most` stages that the rank computes are
    whole or on their way, and those of its other stages are not. These are the places of torch.distributed.pipelining's
    UNSHARD and RESHARD. The result is sound if `schedule` is.

    Args:
        schedule: a schedule without unshards.
        stages: the stages to gather, which are under fully_shard. None: all.
        most: the most stages of a rank that are whole at the same time. A pair needs both of its stages.
        ahead: the most computations by which a gather comes before the first action that it serves. 0: directly before
            it, so that nothing hides it. None: as early as `most` allows, as torch does.

    Raises UsageError for a schedule with unshards, for numbers that are too small, for a stage that does not exist, and
    if a stage would be gathered more often than it has microbatches.

    >>> from pipeflow import make_schedule
    >>> schedule = make_schedule("looped-bfs", ranks=1, microbatches=2, chunks=2)
    >>> print(with_unshard(schedule, most=1))
    rank 0: 0U0 0F0 0F1 0H0 1U0 1F0 1F1 1B0 1B1 1H0 0U1 0B0 0B1 0H1
    """
    require_schedule(schedule)
    among = stages_among(schedule.placement, stages)
    if most < 1 or (ahead is not None and ahead < 0):
        raise UsageError(f"most is at least 1 and ahead at least 0; got most={most} and ahead={ahead}")
    if schedule.kinds & {Kind.U, Kind.H}:
        raise UsageError(f"schedule {schedule.name!r} has unshards already: give schedule.without_unshards()")
    rows = tuple(tuple(_unsharded(row, among, most, ahead)) for row in schedule.rows)
    return replace(schedule, name=f"{schedule.name} with unshard", rows=rows)


def gathering(schedule: Schedule) -> Schedule:
    """The schedule with gathers of its stages where torch.distributed.pipelining has them, unless it has some. A stage
    that would be gathered more often than it has microbatches stays whole, and so do the others of its rank.
    """
    if Stream.GATHER in schedule.streams:
        return schedule
    try:
        return with_unshard(schedule)
    except UsageError:
        return with_unshard(schedule, most=schedule.placement.num_stages)


def _unsharded(row: tuple[Entry, ...], stages: frozenset[int], most: int, ahead: int | None) -> Iterator[Entry]:
    """The row with unshards and reshards of `stages`. The numbers of the unshards of a stage are those of its
    microbatches, so that no two ranks that hold a stage have the same.
    """
    numbers: defaultdict[int, set[int]] = defaultdict(set)
    for action in (action for entry in row for action in actions_of(entry)):
        numbers[action.stage].add(action.microbatch)
    left = {stage: iter(sorted(numbers[stage])) for stage in stages}
    whole: dict[int, int] = {}  # stage -> the number of its unshard
    for entry, following in zip(row, _next_uses(row, stages), strict=True):
        distances = [*following.values()]
        last = distances[min(most, len(distances)) - 1] if distances else 0
        wanted = [stage for stage, distance in following.items() if distance <= last] if _used(entry) else [*whole]
        for stage in [stage for stage in whole if stage not in wanted]:
            yield Action(Kind.H, stage, whole.pop(stage))
        for stage in wanted:
            if stage not in whole and (ahead is None or following[stage] <= ahead):
                if (number := next(left[stage], None)) is None:
                    raise UsageError(
                        f"with most={most}, stage {stage} would be gathered more often than its {len(numbers[stage])} "
                        "microbatches: allow more stages to be whole at once"
                    )
                whole[stage] = number
                yield Action(Kind.U, stage, number)
        yield entry
    yield from (Action(Kind.H, *each) for each in whole.items())


def _next_uses(row: tuple[Entry, ...], stages: frozenset[int]) -> list[dict[int, int]]:
    """Per entry, the stages that it or a later entry uses, with the number of computations before their next use, the
    next ones first.
    """
    found: list[dict[int, int]] = []
    following: dict[int, int] = {}
    for used in map(_used, reversed(row)):
        now = dict.fromkeys(sorted(used & stages), 0)
        later = {stage: distance + bool(used) for stage, distance in following.items() if stage not in now}
        following = now | later
        found.append(following)
    return found[::-1]


def _used(entry: Entry) -> frozenset[int]:
    """The stages whose weights an entry uses."""
    actions = actions_of(entry)
    return frozenset(action.stage for action in actions if DATAFLOW[action.kind].within is Content.WEIGHTS)


STAGE_OPTIONS = {
    "recompute_stages": "compute again what forwards save, on these stages: all, or such as 0,2-3",
    "unshard_stages": "gather weights under fully_shard ahead, on these stages: all, or such as 0,2-3",
    "offload_stages": "move what forwards save to the host and back, on these stages: all, or such as 0,2-3",
}
"""The options of users for `recompute`, `unshard` and `offload`, and what they mean."""


def with_memory_kinds(
    schedule: Schedule,
    *,
    recompute: object = False,
    unshard: object = False,
    offload: object = False,
    cost: object = None,
) -> Schedule:
    """`schedule` as `with_recompute`, then `with_unshard` and then `with_offload` make it for these stages: True for
    all, False for none. `cost` is for offloads.

    Raises UsageError as they do, for an offload without costs, and for stages that are neither a bool nor numbers.
    """
    if recompute is not False:
        schedule = with_recompute(schedule, _stages("recompute", recompute))
    if unshard is not False:
        schedule = with_unshard(schedule, _stages("unshard", unshard))
    if offload is False:
        return schedule
    if not isinstance(cost, CostModel):
        raise UsageError(
            "an offload is planned by the time of its copies: give cost=CostModel(...) with offload=, the time of a "
            f"copy per stage; got {cost!r}"
        )
    from pipeflow.schedules.orders.offloading import with_offload  # simulates: the command lists without it

    return with_offload(schedule, cost, _stages("offload", offload))


def stages_in(text: str) -> bool | tuple[int, ...]:
    """The stages that a text names: True for "all", or numbers and ranges with commas between. Raises UsageError for
    other texts.

    >>> stages_in("0,2-3")
    (0, 2, 3)
    """
    if text == "all":
        return True
    if not _STAGES.fullmatch(text):
        raise UsageError(f"it must be all, or stages such as 0,2-3, got {text[:40]!r}")
    ends = [(int(first), int(last or first)) for first, _, last in (part.partition("-") for part in text.split(","))]
    if wrong := [(first, last) for first, last in ends if first > last]:
        first, last = wrong[0]
        raise UsageError(f"the stages {first}-{last} go down: write {last}-{first}, got {text[:40]!r}")
    return tuple(stage for first, last in ends for stage in range(first, last + 1))


_STAGES = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", re.ASCII)


def _stages(option: str, given: object) -> tuple[int, ...] | None:
    """The stages; None for all of them."""
    if given is True:
        return None
    stages = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if isinstance(given, Iterable) and all(isinstance(stage, int) for stage in stages):
        return stages
    raise UsageError(f"{option} is True, for all stages, or a list of stages such as [0, 1], got {given!r}")
