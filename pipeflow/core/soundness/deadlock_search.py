"""Deadlocks: the ranks of a schedule that wait for each other for ever, what each of them waits for, and who would make
it, in words. Must not contain: other faults of a schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from typing import NamedTuple

from pipeflow.core.action import Action, Kind, actions_of
from pipeflow.core.analysis.order import Order, Stuck
from pipeflow.core.dataflow import MAKERS, Content, Key, Value, makers, needs
from pipeflow.core.errors import Violation
from pipeflow.core.schedule import Schedule

Place = tuple[int, int]  # rank, position


class Cycle(NamedTuple):
    """Ranks that wait for each other.

    Attributes:
        stuck: the place where each rank is stuck. Each waits for something at or behind the next one.
        chain: the places in the order in which they would have to run, for each rank where it is stuck and what the
            rank before it waits for; the first one comes again at the end.
    """

    stuck: list[Place]
    chain: list[Place]


def cycles(stuck: Sequence[Place], waits_for: Callable[[Place], Place | None]) -> Iterator[Cycle]:
    """Every cycle among the places where ranks are `stuck`.

    Args:
        stuck: places of the ranks that cannot go on, one per rank.
        waits_for: the place that a stuck place waits for. On another rank it is where that rank is stuck, or later.
            None: it waits for something that no place makes.
    """
    at = dict(stuck)
    seen: set[int] = set()
    for start in at:
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in seen:
            seen.add(rank)
            path.append(rank)
            maker = waits_for((rank, at[rank]))
            rank = None if maker is None else maker[0]
        if rank is not None and rank in path:
            places = [(each, at[each]) for each in path[path.index(rank) :]]
            yield Cycle(places, _chain(places, waits_for))


def _chain(cycle: list[Place], waits_for: Callable[[Place], Place | None]) -> list[Place]:
    chain = cycle[:1]
    for place in reversed(cycle):
        needed = waits_for(place)
        if needed is not None and needed != chain[-1]:
            chain.append(needed)
        chain.append(place)
    return chain


class Wait(NamedTuple):
    """Why a rank cannot go on.

    Attributes:
        rank, position: the place of the entry where it is stuck.
        action: the action of the entry that waits.
        value: the value that it waits for. None: the rank cannot run the action at all.
        maker: the place of the first entry that makes the value and has not run, on the rank that holds its stage if
            there is one there. None if no entry makes the value.
        earlier: if there is no `maker`, the place of the entry that made the value for another use. None if there is
            none.
    """

    rank: int
    position: int
    action: Action
    value: Value | None
    maker: Place | None = None
    earlier: Place | None = None


def waits(schedule: Schedule, stuck: Sequence[Stuck]) -> list[Wait]:
    """The wait of each rank that is stuck, in the order of `stuck`."""
    at = {rank: position for rank, position, _ in stuck}
    places = _places(schedule, {value for *_, value in stuck if value is not None})
    found = []
    for rank, position, value in stuck:
        actions = actions_of(schedule.rows[rank][position])
        if value is None:
            found.append(Wait(rank, position, actions[0], None))
            continue
        action = next(each for each in actions if value in needs(each, schedule.placement.num_stages, schedule.slices))
        holder = schedule.placement.rank_of(value.stage, value.microbatch)
        made = sorted(places[value], key=lambda place: place[0] != holder)
        maker = next((each for each in made if each[1] >= at.get(each[0], each[1] + 1)), None)
        earlier = made[-1] if maker is None and made else None
        found.append(Wait(rank, position, action, value, maker, earlier))
    return found


def _places(schedule: Schedule, values: set[Value]) -> dict[Value, list[Place]]:
    """The places where each of `values` is made, in the order of ranks."""
    made_by: defaultdict[Key, list[Value]] = defaultdict(list)
    for value in values:
        for key in makers(value):
            made_by[key].append(value)
    found: dict[Value, list[Place]] = {value: [] for value in values}
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            for action in actions_of(entry):
                for value in made_by.get((action.kind, *action.work), ()):
                    found[value].append((rank, position))
    return found


THINGS = {  # what an action of another place made
    Content.SAVED: "what {maker} saves",
    Content.DEFERRED: "what {maker} leaves to it",
}
RULES = {  # of actions on what a forward saved, whose place their needs alone do not say to people
    Kind.C: "C stands before the backward of its microbatch (B or I)",
    Kind.O: "O and L stand, in this order, between the forward of their microbatch and its backward (B or I)",
}
OTHER = "the {content} of {maker}"


def _sentence_of_deadlock(schedule: Schedule, found: Sequence[Wait]) -> str:
    """Who waits for what in a deadlock, such as "deadlock: 0B0 on rank 0 needs the gradient of 1B0, which rank 1 runs
    later, at position 3; 1F1 on rank 1 needs the activation of 0F1, which rank 0 runs later, at position 2".
    """
    stuck = {(wait.rank, wait.position) for wait in found}
    said = [sentence_of_wait(schedule, wait, stuck, f"{wait.action} on rank {wait.rank}") for wait in found]
    kinds = {kind for wait in found for kind in _on_saved(schedule, wait)}
    return "deadlock: " + "; ".join([*said, *(rule for kind, rule in RULES.items() if kind in kinds)])


def _on_saved(schedule: Schedule, wait: Wait) -> set[Kind]:
    """The kinds of RULES that take part in a wait; a load counts as its offload."""
    place = wait.maker or wait.earlier
    made = [] if place is None else actions_of(schedule.rows[place[0]][place[1]])
    kinds = {wait.action.kind, *(each.kind for each in made)}
    return {Kind.O if kind is Kind.L else kind for kind in kinds}


def sentence_of_wait(schedule: Schedule, wait: Wait, stuck: Collection[Place], waiting: str = "") -> str:
    """Why a rank cannot go on, such as "1F3 needs the activation of 0F3, which rank 0 runs later, at position 7".
    `stuck` has the places where ranks are stuck, and `waiting` names the action that waits.
    """
    value, waiting = wait.value, waiting or str(wait.action)
    if value is None:
        return _why_foreign(schedule, wait)
    thing = THINGS.get(value.content, OTHER)
    place = wait.maker or wait.earlier
    if place is None:
        kinds = MAKERS[value.content]
        names = [
            str(Action(kind, value.stage, value.microbatch, value.slice)) for kind in kinds if kind in schedule.kinds
        ]
        names = names or [str(Action(kind, value.stage, value.microbatch, value.slice)) for kind in kinds]
        holder = schedule.placement.rank_of(value.stage, value.microbatch)
        needed = thing.format(content=value.content, maker=" or ".join(names))
        return f"{waiting} needs {needed}, which is missing on rank {holder}"
    actions = actions_of(schedule.rows[place[0]][place[1]])
    made = next(each for each in actions if (each.kind, *each.work) in makers(value))
    needed = f"{waiting} needs {thing.format(content=value.content, maker=made)}"
    if wait.maker is None:
        return f"{needed}, which is used up already"
    who = "this rank" if place[0] == wait.rank else f"rank {place[0]}"
    if place in stuck:
        return f"{needed}, which {who} cannot run either, at position {place[1]}"
    return f"{needed}, which {who} runs later, at position {place[1]}"


def _why_foreign(schedule: Schedule, wait: Wait) -> str:
    """Why a rank cannot run an action of a stage that it does not hold."""
    stages, action = schedule.placement.num_stages, wait.action
    if action.stage >= stages:
        return f"{action} does not exist: there are stages 0 to {stages - 1}"
    holder = schedule.placement.rank_of(action.stage, action.microbatch)
    return f"{action} cannot run on rank {wait.rank}: rank {holder} holds its stage"


ROUNDS = 20  # rounds: each assumes that the deadlocks found so far are fixed, and searches again


def deadlocks(
    schedule: Schedule,
    whole: Schedule | None = None,
    positions: Sequence[Sequence[int]] = (),
    *,
    given: Set[Value] = frozenset(),
) -> Iterator[Violation]:
    """The deadlocks of a schedule whose actions are the right ones, each once, on their ranks. The values of `given`
    are there from the start. If it is a part of the `whole` schedule, violations are about the places there:
    `positions` has them, per rank and entry.

    A deadlock keeps its ranks from going on, so it hides those behind it. What its ranks wait for is therefore taken as
    given, and the search is repeated until no rank is in a deadlock, at most `ROUNDS` times. Each further deadlock is
    one in the whole schedule too, since the given values only take waits away. Each place is reported once.
    """

    def place_of(place: Place) -> Place:
        return (place[0], positions[place[0]][place[1]]) if whole else place

    def moved(wait: Wait) -> Wait:
        _, position = place_of((wait.rank, wait.position))
        return wait._replace(position=position, maker=wait.maker and place_of(wait.maker))

    told: set[Place] = set()
    for _ in range(ROUNDS):
        together = _together(schedule, given)
        for cycle, waiting in together:
            given = given | {wait.value for wait in waiting if wait.value is not None}
            if told.intersection(cycle.stuck):
                continue
            told.update(cycle.stuck)
            chain = [place_of(place) for place in cycle.chain[:-1]]
            said = _sentence_of_deadlock(whole or schedule, [moved(wait) for wait in waiting])
            yield Violation(said, "", *chain[0], tuple(chain))
        if not together:
            return


def _together(schedule: Schedule, given: Set[Value]) -> list[tuple[Cycle, list[Wait]]]:
    """The cycles among the ranks that are stuck, each with the waits of its ranks."""
    order = Order(schedule, given=given)
    for _ in order:
        pass
    found = {wait.rank: wait for wait in waits(schedule, order.waiting)}
    stuck = [(wait.rank, wait.position) for wait in found.values()]
    return [(each, [found[rank] for rank, _ in each.stuck]) for each in cycles(stuck, lambda at: found[at[0]].maker)]
