"""Ways: the stages through which tensors pass, so that no rank receives a tensor twice, or one that it does not need.
Must not contain: which stage needs which tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeflow.core.placement import Placement
from pipeflow.core.route import Routes, routes_among, sources_of, targets_of, way
from pipeflow.stages.script import TensorRef


class Ways(NamedTuple):
    """The tensors that pass to and from one stage.

    Attributes:
        takes: for each stage from which it receives, the tensors, in the order of its inputs.
        gives: for each stage to which it sends, the tensors, in the order of its outputs.
    """

    takes: Mapping[int, tuple[TensorRef, ...]]
    gives: Mapping[int, tuple[TensorRef, ...]]


class Laid(NamedTuple):
    """The ways of all stages, and the routes that they use."""

    ways: tuple[Ways, ...]
    routes: Routes


def lay(
    makes: Sequence[Sequence[TensorRef]],
    needs: Sequence[Sequence[TensorRef]],
    placement: Placement,
    routes: Routes | None,
) -> Laid:
    """The ways of the tensors that each stage makes for later ones, and needs from earlier ones. If `routes` is None,
    the best routes are chosen; otherwise tensors without a route pass through the stages between.
    """
    passing: dict[tuple[int, int], set[TensorRef]] = defaultdict(set)
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
