"""Clocks: the times of ranks on one clock. Values that pass between ranks tell how far the clocks of two machines are
apart: nothing is used before it was made, in either direction. Must not contain: anything else about values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import needs
from pipeflow.traces.steps import Step

Key = tuple[Kind, int, int]


def offsets(steps: Sequence[Step], num_stages: int, hosts: Sequence[str]) -> list[float]:
    """Per rank, the seconds to add to its times. None are added to ranks of one machine, whose clock they share, unless
    they contradict it.

    The shortest delay from rank to rank is taken as equal in both directions, so half of the difference between the two
    shortest ones that were measured is the difference between the clocks.
    """
    delays = _shortest(steps, num_stages)
    shifts = [0.0] * len(hosts)
    known, waiting = {0}, [0]
    while waiting:
        rank = waiting.pop()
        for other in range(len(hosts)):
            there, back = delays.get((rank, other)), delays.get((other, rank))
            if other in known or there is None or back is None:
                continue
            known.add(other)
            waiting.append(other)
            apart = hosts[rank] != hosts[other] or not hosts[rank] or min(there, back) < 0
            shifts[other] = shifts[rank] + (back - there) / 2 * apart
    return shifts


def _shortest(steps: Sequence[Step], num_stages: int) -> dict[tuple[int, int], float]:
    """The shortest time from when one rank made a value until another one used it, by (maker, user)."""
    found: dict[tuple[int, int], float] = {}
    for step in steps:
        made: dict[Key, tuple[int, float]] = {}
        for rank, actions in enumerate(step):
            for each in actions:
                made[each.action.kind, each.action.stage, each.action.microbatch] = rank, each.end
        for rank, actions in enumerate(step):
            for each in actions:
                for key in _makers(each.action, num_stages):
                    if key in made and (maker := made[key])[0] != rank:
                        place = maker[0], rank
                        found[place] = min(found.get(place, math.inf), each.start - maker[1])
    return found


def _makers(action: Action, num_stages: int) -> Iterator[Key]:
    """The actions that may make the values that an action gets from other stages."""
    for value in needs(action, num_stages):
        if value.stage != action.stage:
            kinds = (Kind.F,) if action.kind is Kind.F else (Kind.B, Kind.I)
            yield from ((kind, value.stage, value.microbatch) for kind in kinds)
