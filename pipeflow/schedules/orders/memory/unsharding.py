"""Unsharding: a schedule in which weights under fully_shard are gathered ahead, once for several actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.dataflow import DATAFLOW, Content, Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.rows import handles
from pipeflow.core.schedule import Schedule, require_schedule
from pipeflow.schedules.orders.memory.recomputation import stages_among

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
    if any(handles(entry, Content.WEIGHTS) for row in schedule.rows for entry in row):
        raise UsageError(f"schedule {schedule.name!r} has unshards already: give schedule.without_unshards()")
    rows = tuple(tuple(_UnshardRow(row, among, most, ahead).entries()) for row in schedule.rows)
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


class _UnshardRow:
    """A row, with the numbers of the unshards of each stage: those of its microbatches, so that no two ranks that hold
    a stage have the same.
    """

    def __init__(self, row: tuple[Entry, ...], stages: frozenset[int], most: int, ahead: int | None) -> None:
        self.row, self.most, self.ahead = row, most, ahead
        self.used = [_used(entry) for entry in row]
        self.stages = stages
        self.whole: dict[int, int] = {}  # stage -> the number of its unshard
        self.gathered = dict.fromkeys(stages, 0)

    def entries(self) -> Iterator[Entry]:
        for entry, used, following in zip(self.row, self.used, self._following(), strict=True):
            if used:
                yield from self._before(following)
            yield entry
        yield from (Action(Kind.H, *each) for each in self.whole.items())

    def _following(self) -> list[dict[int, int]]:
        """Per entry, the stages that it or a later entry uses, with the number of computations before their next use,
        the next ones first.
        """
        found: list[dict[int, int]] = []
        following: dict[int, int] = {}
        for used in reversed(self.used):
            now = dict.fromkeys(sorted(used & self.stages), 0)
            later = {stage: distance + bool(used) for stage, distance in following.items() if stage not in now}
            following = now | later
            found.append(following)
        return found[::-1]

    def _before(self, following: Mapping[int, int]) -> Iterator[Action]:
        """The unshards and reshards before a computation."""
        distances = [*following.values()]
        last = distances[min(self.most, len(distances)) - 1] if distances else 0
        wanted = [stage for stage, distance in following.items() if distance <= last]
        for stage in [stage for stage in self.whole if stage not in wanted]:
            yield Action(Kind.H, stage, self.whole.pop(stage))
        for stage in wanted:
            if stage not in self.whole and (self.ahead is None or following[stage] <= self.ahead):
                self.whole[stage] = self._number(stage)
                yield Action(Kind.U, stage, self.whole[stage])

    def _number(self, stage: int) -> int:
        actions = (action for entry in self.row for action in actions_of(entry) if action.stage == stage)
        numbers = sorted({action.microbatch for action in actions})
        if self.gathered[stage] == len(numbers):
            raise UsageError(
                f"with most={self.most}, stage {stage} would be gathered more often than its {len(numbers)} "
                "microbatches: allow more stages to be whole at once"
            )
        self.gathered[stage] += 1
        return numbers[self.gathered[stage] - 1]


def _used(entry: Entry) -> frozenset[int]:
    """The stages whose weights an entry uses."""
    actions = actions_of(entry)
    return frozenset(action.stage for action in actions if DATAFLOW[action.kind].within is Content.WEIGHTS)
