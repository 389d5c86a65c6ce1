"""Sentences: what is wrong with an action of a schedule, what it needs, and who makes that, in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeflow.core.action import Action, Kind, actions_of
from pipeflow.core.dataflow import MAKERS, Content, Value, makes
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.missing_values import Wait
from pipeflow.core.soundness.waiting_cycles import Place

THINGS = {  # what an action of another place made
    Content.SAVED: "what {maker} saves",
    Content.DEFERRED: "what {maker} leaves to it",
}
RULES = {  # of actions on what a forward saved, whose place their needs alone do not say to people
    Kind.C: "C stands before the backward of its microbatch (B or I)",
    Kind.O: "O and L stand, in this order, between the forward of their microbatch and its backward (B or I)",
}
OTHER = "the {content} of {maker}"


def sentence_of_deadlock(schedule: Schedule, found: Sequence[Wait]) -> str:
    """Who waits for what in a deadlock, such as "deadlock: 0B0 on rank 0 needs the gradient of 1B0, which rank 1 runs
    later, at position 3; 1F1 on rank 1 needs the activation of 0F1, which rank 0 runs later, at position 2".
    """
    stuck = {(wait.rank, wait.position) for wait in found}
    waits = [_sentence(schedule, wait, stuck, f"{wait.action} on rank {wait.rank}") for wait in found]
    kinds = {kind for wait in found for kind in _on_saved(schedule, wait)}
    return "deadlock: " + "; ".join([*waits, *(rule for kind, rule in RULES.items() if kind in kinds)])


def sentence_of_wait(schedule: Schedule, wait: Wait, stuck: Collection[Place]) -> str:
    """Why a rank cannot go on, such as "1F3 needs the activation of 0F3, which rank 0 runs later, at position 7".
    `stuck` has the places where ranks are stuck.
    """
    return _sentence(schedule, wait, stuck, str(wait.action))


def _on_saved(schedule: Schedule, wait: Wait) -> set[Kind]:
    """The kinds of RULES that take part in a wait; a load counts as its offload."""
    place = wait.maker or wait.earlier
    made = [] if place is None else actions_of(schedule.rows[place[0]][place[1]])
    kinds = {wait.action.kind, *(each.kind for each in made)}
    return {Kind.O if kind is Kind.L else kind for kind in kinds}


def _sentence(schedule: Schedule, wait: Wait, stuck: Collection[Place], waiting: str) -> str:
    """The sentence of a wait; `waiting` names the action that waits."""
    value = wait.value
    if value is None:
        return _foreign(schedule, wait)
    place = wait.maker or wait.earlier
    if place is None:
        names = [str(Action(kind, value.stage, value.microbatch)) for kind in _kinds(schedule, value)]
        holder = schedule.placement.rank_of(value.stage, value.microbatch)
        return f"{waiting} needs {_thing(value, ' or '.join(names))}, which is missing on rank {holder}"
    entry = schedule.rows[place[0]][place[1]]
    made = next(each for each in actions_of(entry) if value in _makes(schedule, each))
    needed = f"{waiting} needs {_thing(value, str(made))}"
    if wait.maker is None:
        return f"{needed}, which is used up already"
    who = "this rank" if place[0] == wait.rank else f"rank {place[0]}"
    if place in stuck:
        return f"{needed}, which {who} cannot run either, at position {place[1]}"
    return f"{needed}, which {who} runs later, at position {place[1]}"


def _makes(schedule: Schedule, action: Action) -> list[Value]:
    stages = schedule.placement.num_stages
    return makes(action, stages) if action.stage < stages else []


def _thing(value: Value, maker: str) -> str:
    return THINGS.get(value.content, OTHER).format(content=value.content, maker=maker)


def _kinds(schedule: Schedule, value: Value) -> list[Kind]:
    """The kinds of action that could make a value; those that the schedule uses, if it uses any."""
    used = {action.kind for rank in range(len(schedule.rows)) for action in schedule.actions(rank)}
    kinds = MAKERS[value.content]
    return [kind for kind in kinds if kind in used] or [*kinds]


def _foreign(schedule: Schedule, wait: Wait) -> str:
    """Why a rank cannot run an action of a stage that it does not hold."""
    stages, action = schedule.placement.num_stages, wait.action
    if action.stage >= stages:
        return f"{action} does not exist: there are stages 0 to {stages - 1}"
    holder = schedule.placement.rank_of(action.stage, action.microbatch)
    return f"{action} cannot run on rank {wait.rank}: rank {holder} holds its stage"
