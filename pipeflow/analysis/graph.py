"""The dependency graph of a schedule, on networkx: for cycles, and for whoever wants to ask more of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.core.action import Action
from pipeflow.core.dataflow import makes, needs
from pipeflow.core.schedule import Schedule

if TYPE_CHECKING:
    import networkx


def dependency_graph(schedule: Schedule) -> networkx.DiGraph[Action]:
    """Actions as nodes (with `rank` and `position`), and an edge from each action to those that wait for it.

    An edge's `reason` is "row" (the next on the same rank) or the value that passes, as text. The schedule can
    run to its end if and only if every needed value has a maker and this graph has no cycle.
    """
    import networkx

    stages = schedule.placement.num_stages
    graph: networkx.DiGraph[Action] = networkx.DiGraph()
    makers = {}
    for rank in range(len(schedule.rows)):
        previous = None
        for position, action in enumerate(schedule.actions(rank)):
            graph.add_node(action, rank=rank, position=position)
            makers.update(dict.fromkeys(makes(action, stages), action))
            if previous is not None:
                graph.add_edge(previous, action, reason="row")
            previous = action
    for action in list(graph):
        for value in needs(action, stages):
            if value in makers:
                graph.add_edge(makers[value], action, reason=str(value))
    return graph
