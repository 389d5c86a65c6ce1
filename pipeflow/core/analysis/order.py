"""Order: an order in which all actions of a schedule can run, each entry as soon as its values exist, and the graph of
which action waits for which. Must not contain: times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from pipeflow.core.action import Action, Entry, actions_of
from pipeflow.core.dataflow import End, Stream, Value, flows, makes, needs, stream_of
from pipeflow.core.errors import ScheduleError
from pipeflow.core.route import Routes
from pipeflow.core.rows import HANDLING, first_uses
from pipeflow.core.schedule import Schedule, require_schedule

if TYPE_CHECKING:
    import networkx


class Turn(NamedTuple):
    """One entry of a row that can run now. Values are numbers here, see `Order.ends`."""

    rank: int
    actions: tuple[Action, ...]
    needs: list[int]
    makes: list[int]


class Stuck(NamedTuple):
    """An entry that waits for ever.

    Attributes:
        rank, position: its place.
        value: the value that it waits for. None: its rank cannot run it at all.
    """

    rank: int
    position: int
    value: Value | None


class Order:
    """Iterates over the entries of a schedule in an order in which every value is made before it is used.

    A value is the number `index * num_microbatches + microbatch`, where `ends[index]` is the value without its
    microbatch. Schedules have hundreds of thousands of values, and numbers are what Python handles fastest.

    The values of `given` exist from the start. After the iteration, `stuck` has the (rank, position) of every entry
    that waits for ever: none unless the schedule is unsound. Raises ScheduleError for a stage or microbatch that does
    not exist, and for an action on a rank that does not hold its stage.
    """

    def __init__(self, schedule: Schedule, routes: Routes = (), given: Iterable[Value] = ()) -> None:
        num_stages = schedule.placement.num_stages
        table = flows(num_stages, routes, schedule.slices)
        self.ends: list[End] = list(dict.fromkeys(end for flow in table.values() for end in flow.makes))
        self._many = schedule.num_microbatches
        self._first = first = {end: index * self._many for index, end in enumerate(self.ends)}
        self._numbers = {key: [[first[end] for end in ends] for ends in flow] for key, flow in table.items()}
        self._holders = [[path[stage] for path in schedule.placement.paths] for stage in range(num_stages)]
        self._rows = schedule.rows
        self._positions = [0] * len(self._rows)
        self._first_uses = {} if HANDLING.isdisjoint(schedule.kinds) else _first_uses(schedule)
        self._made = bytearray(len(self.ends) * self._many)
        for content, stage, microbatch, to, part in given:
            self._made[first[End(content, stage, to, part)] + microbatch] = 1

    def __iter__(self) -> Iterator[Turn]:
        rows, positions, made = self._rows, self._positions, self._made
        waiting: dict[int, Turn] = {}  # value -> the turn that waits for it
        turns = [first for rank in range(len(rows)) if (first := self._next(rank))]
        while turns:
            turn: Turn | None = turns.pop()
            while turn is not None:
                for value in turn.needs:
                    if not made[value]:
                        waiting[value] = turn
                        turn = None
                        break
                else:
                    yield turn
                    for value in turn.needs:  # used up until it is made again
                        made[value] = 0
                    for value in turn.makes:
                        made[value] = 1
                        if value in waiting:
                            turns.append(waiting.pop(value))
                    positions[turn.rank] += 1
                    turn = self._next(turn.rank)

    def _next(self, rank: int) -> Turn | None:
        """The turn at the current position of `rank`; None at the end of its row."""
        position = self._positions[rank]
        if position == len(self._rows[rank]):
            return None
        entry = self._rows[rank][position]
        if isinstance(entry, Action):
            return self._numbered(rank, entry)
        forward, backward = self._numbered(rank, entry.forward), self._numbered(rank, entry.backward)
        actions = forward.actions + backward.actions
        return Turn(rank, actions, forward.needs + backward.needs, forward.makes + backward.makes)

    def _numbered(self, rank: int, action: Action) -> Turn:
        stage, microbatch = action.stage, action.microbatch
        numbers = self._numbers.get((action.kind, stage, action.slice))
        if numbers is None or microbatch >= self._many:
            raise ScheduleError(f"rank {rank}: there is no {action} in this schedule; see verify()")
        holders = self._holders[stage]
        if (holder := holders[microbatch % len(holders)]) != rank:
            raise ScheduleError(f"rank {rank}: {action} belongs on rank {holder}, which holds its stage; see verify()")
        needs, makes = [first + microbatch for first in numbers[0]], [first + microbatch for first in numbers[1]]
        if self._first_uses and (value := self._first_uses.get((rank, action))):
            number = self._first[End(value.content, stage)] + value.microbatch
            needs.append(number)
            makes.append(number)  # it leaves it to the actions after it
        return Turn(rank, (action,), needs, makes)

    @property
    def stuck(self) -> list[tuple[int, int]]:
        ends = zip(self._positions, self._rows, strict=True)
        return [(rank, position) for rank, (position, row) in enumerate(ends) if position < len(row)]

    @property
    def waiting(self) -> list[Stuck]:
        """The entries of `stuck`, each with the first value that it needs and that does not exist."""
        return [Stuck(rank, position, self._awaited(rank)) for rank, position in self.stuck]

    def _awaited(self, rank: int) -> Value:
        turn = self._next(rank)
        assert turn is not None  # a stuck rank has an entry
        index, microbatch = divmod(next(value for value in turn.needs if not self._made[value]), self._many)
        return self.ends[index].of(microbatch)


def _first_uses(schedule: Schedule) -> dict[tuple[int, Action], Value]:
    ranks = range(len(schedule.rows))
    return {(rank, action): value for rank in ranks for action, value in first_uses(schedule.actions(rank)).items()}


def dependency_graph(schedule: Schedule) -> networkx.DiGraph[Action]:
    """The dependencies between the actions of a schedule.

    Nodes are actions, with their `rank` and `position`. An edge leads from an action to each action that waits for it.
    Its `reason` is "row" for the next action on the same rank, or the text of the value that passes. The two actions of
    a pair share their dependencies, in both directions. A reduction runs beside the computations. It waits for the
    computation before it and for the reduction before it. An action waits for a reduction only if it needs its result.

    A schedule can run to its end if and only if every needed value is made and this graph has no cycle.

    Raises ScheduleError for an action of a stage that does not exist.
    """
    import networkx

    require_schedule(schedule)
    stages, slices = schedule.placement.num_stages, schedule.slices
    for rank in range(len(schedule.rows)):
        if foreign := next((action for action in schedule.actions(rank) if action.stage >= stages), None):
            raise ScheduleError(f"rank {rank}: there is no {foreign} in this schedule; see verify()")
    graph: networkx.DiGraph[Action] = networkx.DiGraph()
    makers: dict[Value, list[Entry]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            graph.add_nodes_from(actions_of(entry), rank=rank, position=position)
            for value in (value for action in actions_of(entry) for value in makes(action, stages, slices)):
                makers[value].append(entry)
        for before, after in _in_row(row):
            graph.add_edges_from(product(actions_of(before), actions_of(after)), reason="row")
    for rank in range(len(schedule.rows)):
        for action, value in first_uses(schedule.actions(rank)).items():
            graph.add_edges_from(product(actions_of(makers[value][0]), [action]), reason=str(value))
    for entry in (entry for row in schedule.rows for entry in row):
        for value in (value for action in actions_of(entry) for value in needs(action, stages, slices)):
            if makers[value]:  # each use takes the first one made that is not used yet
                maker = makers[value].pop(0)
                graph.add_edges_from(product(actions_of(maker), actions_of(entry)), reason=str(value))
    return graph


def _in_row(row: tuple[Entry, ...]) -> Iterator[tuple[Entry, Entry]]:
    """Pairs of entries in which the second waits for the first because of the row. Every entry waits for the
    computation before it and for the entry before it on its stream.
    """
    last: dict[Stream, Entry] = {}
    for entry in row:
        stream = stream_of(entry)
        for before in dict.fromkeys((Stream.COMPUTE, stream)):
            if before in last:
                yield last[before], entry
        last[stream] = entry
