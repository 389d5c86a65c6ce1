"""Stuck: the deadlocks of a schedule, also of one in which more is wrong. Must not contain: what else is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from pipeflow.analysis.order import Order
from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.dataflow import DATAFLOW, Value, makes, needs
from pipeflow.core.schedule import Schedule
from pipeflow.core.violation import Violation
from pipeflow.soundness.deadlocks import cycles, waits
from pipeflow.soundness.missing_actions import nearest, ways_of


def deadlocks_of(schedule: Schedule) -> Iterator[Violation]:
    """Every deadlock of a schedule whose actions are the right ones, each once, on their ranks."""
    return _found(schedule, Order(schedule))


def deadlocks_besides(schedule: Schedule) -> Iterator[Violation]:
    """The deadlocks of a schedule that stay when all else is mended. Left out are actions that do not exist, are on
    another rank, run again or are too many, and reductions; nothing waits for a value that no action makes then.
    """
    places, rest = _rest(schedule)
    for each in _found(rest, Order(rest, given=_unmade(rest))):
        cycle = tuple((rank, places[rank][position]) for rank, position in each.cycle)
        yield replace(each, position=cycle[0][1], cycle=cycle)


def _found(schedule: Schedule, order: Order) -> Iterator[Violation]:
    for _ in order:
        pass
    return cycles(schedule, waits(schedule, order.waiting))


def _rest(schedule: Schedule) -> tuple[list[list[int]], Schedule]:
    """A schedule without what is in a wrong place; and per rank, the positions of what is left."""
    seen: set[Action] = set()
    kinds: defaultdict[tuple[int, int], set[Kind]] = defaultdict(set)
    kept: list[list[tuple[int, list[Action]]]] = []
    for rank, row in enumerate(schedule.rows):
        kept.append([])
        for position, entry in enumerate(row):
            actions = [each for each in actions_of(entry) if each not in seen and _belongs(schedule, each, rank)]
            seen.update(actions)
            kept[-1].append((position, actions))
            for action in actions:
                kinds[action.stage, action.microbatch].add(action.kind)
    ways = ways_of(schedule)
    right = {place: nearest(has, ways) for place, has in kinds.items()}
    rows: list[tuple[Entry, ...]] = []
    places: list[list[int]] = []
    for row, entries in zip(schedule.rows, kept, strict=True):
        left = [
            (position, [each for each in actions if each.kind in right[each.stage, each.microbatch]])
            for position, actions in entries
        ]
        left = [(position, actions) for position, actions in left if actions]
        places.append([position for position, _ in left])
        rows.append(tuple(row[position] if len(actions) > 1 else actions[0] for position, actions in left))
    return places, replace(schedule, rows=tuple(rows))


def _belongs(schedule: Schedule, action: Action, rank: int) -> bool:
    placement = schedule.placement
    exists = action.stage < placement.num_stages and action.microbatch < schedule.num_microbatches
    return exists and not DATAFLOW[action.kind].joint and placement.rank_of(action.stage, action.microbatch) == rank


def _unmade(schedule: Schedule) -> set[Value]:
    """The values that actions of a schedule need and none makes."""
    stages = schedule.placement.num_stages
    actions = [action for rank in range(len(schedule.rows)) for action in schedule.actions(rank)]
    made = {value for action in actions for value in makes(action, stages)}
    return {value for action in actions for value in needs(action, stages)} - made
