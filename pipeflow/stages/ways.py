"""Ways: from which stage to which the tensors between stages pass, so that none is sent twice to a rank, or to one that
has no use for it. What must not live here: which stage needs what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeflow.core.placement import Placement
from pipeflow.core.route import Routes, routes_among, sources_of, targets_of, way
from pipeflow.stages.script import Value


class Ways(NamedTuple):
    """What passes to and from one stage.

    Attributes:
        takes: per stage from which it receives something, what, in the order of its inputs.
        gives: per stage to which it sends something, what, in the order of its outputs.
    """

    takes: Mapping[int, tuple[Value, ...]]
    gives: Mapping[int, tuple[Value, ...]]


class Laid(NamedTuple):
    """The ways of all stages, and the routes that they pass on."""

    ways: tuple[Ways, ...]
    routes: Routes


def lay(
    makes: Sequence[Sequence[Value]],
    needs: Sequence[Sequence[Value]],
    placement: Placement,
    routes: Routes | None,
) -> Laid:
    """The ways of what each stage makes for later ones, and needs of earlier ones. Without `routes` these follow;
    with them, what passes on no route is handed on by stages between.
    """
    passing: dict[tuple[int, int], set[Value]] = defaultdict(set)
    for maker, values in enumerate(makes):
        for value in values:
            users = [stage for stage, needed in enumerate(needs) if value in needed]
            for stage, source in way(maker, users, placement, routes).items():
                passing[source, stage].add(value)
    stages = len(makes)
    if routes is None:
        routes = routes_among(stages, [edge for edge in passing if edge[1] > edge[0] + 1])
    between = {edge: tuple(sorted(values)) for edge, values in passing.items()}
    ways = [
        Ways(
            {source: between.get((source, stage), ()) for source in sources_of(stage, routes)},
            {target: between.get((stage, target), ()) for target in targets_of(stage, stages, routes)},
        )
        for stage in range(stages)
    ]
    return Laid(tuple(ways), routes)
