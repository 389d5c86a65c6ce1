"""The dependency graph of a schedule as a networkx graph, for cycles and any further questions. Must not contain:
times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

from pipeflow.core.action import Action, Entry, actions_of
from pipeflow.core.dataflow import Stream, Value, makes, needs, stream_of
from pipeflow.core.errors import ScheduleError
from pipeflow.core.lasting import first_uses
from pipeflow.core.schedule import Schedule

if TYPE_CHECKING:
    import networkx


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

    stages = schedule.placement.num_stages
    for rank in range(len(schedule.rows)):
        if foreign := next((action for action in schedule.actions(rank) if action.stage >= stages), None):
            raise ScheduleError(f"rank {rank}: there is no {foreign} in this schedule; see verify()")
    graph: networkx.DiGraph[Action] = networkx.DiGraph()
    makers: dict[Value, list[Entry]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            graph.add_nodes_from(actions_of(entry), rank=rank, position=position)
            for value in (value for action in actions_of(entry) for value in makes(action, stages)):
                makers[value].append(entry)
        for before, after in _in_row(row):
            graph.add_edges_from(product(actions_of(before), actions_of(after)), reason="row")
    for rank in range(len(schedule.rows)):
        for action, value in first_uses(schedule.actions(rank)).items():
            graph.add_edges_from(product(actions_of(makers[value][0]), [action]), reason=str(value))
    for entry in (entry for row in schedule.rows for entry in row):
        for value in (value for action in actions_of(entry) for value in needs(action, stages)):
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
