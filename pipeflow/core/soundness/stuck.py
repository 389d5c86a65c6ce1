"""Stuck: the deadlocks of a schedule, even if it has other faults. Must not contain: these other faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.analysis.order import Order
from pipeflow.core.dataflow import SEVERAL, Value, makes, needs
from pipeflow.core.errors import Violation
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.missing_actions import nearest, ways_of
from pipeflow.core.soundness.missing_values import Wait, waits
from pipeflow.core.soundness.sentences import sentence_of_deadlock
from pipeflow.core.soundness.waiting_cycles import Cycle, Place, cycles

ROUNDS = 20  # rounds: each assumes that the deadlocks found so far are fixed, and searches again


def deadlocks_of(schedule: Schedule) -> Iterator[Violation]:
    """The deadlocks of a schedule whose actions are the right ones, each once, on their ranks."""
    return _found(schedule, set(), schedule, lambda place: place)


def deadlocks_besides(schedule: Schedule) -> Iterator[Violation]:
    """The deadlocks of a schedule that remain when all other faults are removed. Reductions and wrong actions are left
    out: actions that do not exist, are on another rank, run again or are too many. No action waits for a value that no
    remaining action makes.
    """
    places, rest = _rest(schedule)
    return _found(rest, _unmade(rest), schedule, lambda place: (place[0], places[place[0]][place[1]]))


def _found(
    schedule: Schedule, given: set[Value], whole: Schedule, place_of: Callable[[Place], Place]
) -> Iterator[Violation]:
    """The deadlocks of `schedule` if the values of `given` are there from the start. Violations are about the places in
    `whole`, which `place_of` maps to.

    A deadlock keeps its ranks from going on, so it hides those behind it. What its ranks wait for is therefore taken as
    given, and the search is repeated until no rank is in a deadlock, at most `ROUNDS` times. Each further deadlock is
    one in the whole schedule too, since the given values only take waits away. Each place is reported once.
    """
    told: set[Place] = set()
    for _ in range(ROUNDS):
        together = _together(schedule, given)
        for cycle, waiting in together:
            given = given | {wait.value for wait in waiting if wait.value is not None}
            if told.intersection(cycle.stuck):
                continue
            told.update(cycle.stuck)
            chain = [place_of(place) for place in cycle.chain[:-1]]
            said = sentence_of_deadlock(whole, [_moved(wait, place_of) for wait in waiting])
            yield Violation(said, "", *chain[0], tuple(chain))
        if not together:
            return


def _together(schedule: Schedule, given: set[Value]) -> list[tuple[Cycle, list[Wait]]]:
    """The cycles among the ranks that are stuck, each with the waits of its ranks."""
    order = Order(schedule, given=given)
    for _ in order:
        pass
    found = {wait.rank: wait for wait in waits(schedule, order.waiting)}
    stuck = [(wait.rank, wait.position) for wait in found.values()]
    return [(each, [found[rank] for rank, _ in each.stuck]) for each in cycles(stuck, lambda at: found[at[0]].maker)]


def _moved(wait: Wait, place_of: Callable[[Place], Place]) -> Wait:
    _, position = place_of((wait.rank, wait.position))
    return wait._replace(position=position, maker=wait.maker and place_of(wait.maker))


def _rest(schedule: Schedule) -> tuple[list[list[int]], Schedule]:
    """The schedule without entries in a wrong place; and per rank, the positions of the remaining entries."""
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
    return exists and action.kind not in SEVERAL and placement.rank_of(action.stage, action.microbatch) == rank


def _unmade(schedule: Schedule) -> set[Value]:
    """The values that actions of a schedule need and none makes."""
    stages = schedule.placement.num_stages
    actions = [action for rank in range(len(schedule.rows)) for action in schedule.actions(rank)]
    made = {value for action in actions for value in makes(action, stages)}
    return {value for action in actions for value in needs(action, stages)} - made
