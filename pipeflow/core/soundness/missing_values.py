"""Waits: for each rank that waits for ever, the value that it waits for, and the action that would make it. Must not
contain: how such ranks are found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pipeflow.core.action import Action, actions_of
from pipeflow.core.analysis.order import Stuck
from pipeflow.core.dataflow import Key, Value, makers, needs
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.waiting_cycles import Place


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
        action = next(each for each in actions if value in needs(each, schedule.placement.num_stages))
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
                for value in made_by.get((action.kind, action.stage, action.microbatch), ()):
                    found[value].append((rank, position))
    return found
