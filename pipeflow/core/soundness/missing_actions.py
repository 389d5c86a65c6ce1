"""Missing: the actions that a schedule lacks. Must not contain: where in a row they belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import SEVERAL, WHOLE
from pipeflow.core.schedule import Schedule

Ways = Sequence[tuple[Kind, ...]]


class Missing(NamedTuple):
    """An action that a schedule lacks, and the rank that holds its stage."""

    rank: int
    action: Action


def missing(schedule: Schedule) -> list[Missing]:
    """The actions that a step of training still needs, by rank and microbatch. A schedule with only forwards lacks its
    backwards.

    A stage lacks what the nearest way to complete its work needs (`nearest`). Reductions do not count.
    """
    stages, many = schedule.placement.num_stages, schedule.num_microbatches
    seen: dict[tuple[int, int], set[Kind]] = {}
    for action in _each(schedule):
        seen.setdefault((action.stage, action.microbatch), set()).add(action.kind)
    ways = ways_of(schedule)
    found = []
    for microbatch in range(many):
        for stage in range(stages):
            has = seen.get((stage, microbatch), set())
            rank = schedule.placement.rank_of(stage, microbatch)
            lacking = (kind for kind in nearest(has, ways) if kind not in has)
            found += [Missing(rank, Action(kind, stage, microbatch)) for kind in lacking]
    return sorted(found, key=lambda each: each.rank)


def ways_of(schedule: Schedule) -> Ways:
    """The ways to do the work of a microbatch on a stage, such as (F, B). The first is the way of most backwards of the
    schedule.
    """
    number = Counter(action.kind for action in _each(schedule))
    common = set.intersection(*map(set, WHOLE))
    return sorted(WHOLE, key=lambda kinds: -max(number[kind] for kind in kinds if kind not in common))


def nearest(has: Set[Kind], ways: Ways) -> tuple[Kind, ...]:
    """The way for which the fewest kinds must be removed from `has`. If some must be removed, ties go to the way for
    which the fewest must be added. Further ties go to the first way.
    """

    def distance(way: tuple[Kind, ...]) -> tuple[int, int]:
        surplus = len(has - set(way))
        return surplus, len(set(way) - has) if surplus else 0

    return min(ways, key=distance)


def _each(schedule: Schedule) -> Iterable[Action]:
    """The actions that run once per stage and microbatch."""
    rows = (schedule.actions(rank) for rank in range(len(schedule.rows)))
    return (action for row in rows for action in row if action.kind not in SEVERAL)
