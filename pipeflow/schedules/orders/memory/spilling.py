"""Spilling: an order within the room of each rank. What some forwards saved is copied to the host and back, or computed
again. Must not contain: the search for orders.

Recomputations take time. So the order is timed again with them, and what leaves is chosen anew, until no more is to be
computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from math import inf
from typing import NamedTuple

from pipeflow.core.action import Action, Kind
from pipeflow.core.schedule import Schedule
from pipeflow.schedules.orders.memory.host_links import places_in_rows
from pipeflow.schedules.orders.memory.link_spill import LinkSpill, RankRow
from pipeflow.schedules.orders.memory.storage import Place, Storage
from pipeflow.schedules.orders.neighbours import RunTimes, run_times
from pipeflow.schedules.orders.problem import HALVES, Operations


class Spilled(NamedTuple):
    """An order within its room.

    Attributes:
        objective, other: its measures, as those of `ScoredOrder`, with recomputations.
        sequences: per rank, its sequence of operations.
        times: when they run.
        again: the (stage, microbatch) that are computed again, with the time of that.
        copies: per rank and position of its row with recomputations, the copies that come after this entry.
    """

    objective: float
    other: float
    sequences: list[Operations]
    times: RunTimes
    again: Mapping[Place, float]
    copies: list[dict[int, list[Action]]]


def spilled(
    storage: Storage, sequences: Sequence[Operations], again: Mapping[Place, float], stop: float = inf
) -> Spilled | None:
    """The order of `sequences` in which at least `again` are computed again. None if it cannot run, if its objective
    is found to be more than `stop`, or if it does not keep within the room.
    """
    again = dict(again)
    while True:
        times = run_times(storage.problem, sequences, again)
        if times is None or (scored := times.candidate(storage.problem, sequences)).objective > stop:
            return None
        rows = [RankRow.of(storage, rank, sequences, times, again) for rank in range(len(sequences))]
        links = [LinkSpill(storage, [rows[rank] for rank in ranks]) for ranks in storage.links]
        if not all(link.spill() for link in links):
            return None
        more = {value.place: storage.times(value.place).again for link in links for value in link.dropped}
        if not more:
            directions = (direction for link in links for direction in (link.out, link.back))
            return Spilled(*scored, times, again, places_in_rows(directions, [row.ends for row in rows]))
        again |= more


def to_spilled_schedule(name: str, storage: Storage, found: Spilled) -> Schedule:
    """The schedule of an order, with its recomputations and copies."""
    problem, done = storage.problem, Counter[int]()
    rows: list[tuple[Action, ...]] = []
    for sequence, copies in zip(found.sequences, found.copies, strict=True):
        row: list[Action] = []
        entries = count()
        for operation in sequence:
            place = operation // 3, done[operation]
            kinds = (Kind.C, Kind.I) if operation % 3 == 1 and place in found.again else (HALVES[operation % 3],)
            for kind in kinds:
                row += Action(kind, *place), *copies.get(next(entries), ())
            done[operation] += 1
        rows.append(tuple(row))
    return Schedule(name, problem.placement, problem.num_microbatches, tuple(rows))
