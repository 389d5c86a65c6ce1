"""Profiles: what a microbatch costs in a model's layers, and before and after them; and the cut of layers by that. Must
not contain: the order in which stages run.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from pipeflow.core.partition import Part
from pipeflow.core.placement import Placement
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.cuts import cut_by_load
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import physical_costs
from pipeflow.planning.setup import Setup
from pipeflow.planning.transformer_costs import stage_costs


class Profile(NamedTuple):
    """The time of one microbatch in the whole model, and of the parts before and after the layers, in layers."""

    time: float
    first: float
    last: float


def profile(model: Transformer, setup: Setup, cluster: Cluster | None) -> Profile:
    """The profile under a setup: in seconds on a cluster, else in forwards of a layer, with communication free. Raises
    UsageError for a model that the setup does not fit, and as `physical_costs`.
    """
    layers, setup = model.layers, setup if setup.expert > 1 else replace(setup, data=1)
    cut = list(pairwise(sorted({0, 1, max(layers - 1, 1), layers})))
    placement = Placement.linear(len(cut))
    if cluster is None:
        cost = stage_costs(model, placement, setup, cut=cut)
    else:
        mesh = Mesh.of(setup, len(cut), cluster.devices_per_node)
        cost = physical_costs(model, placement, setup, mesh, cluster, cut=cut).cost
    times = [sum(each) for each in zip(cost.forward, cost.backward_input, cost.backward_weight, strict=True)]
    layer = times[1] / (layers - 2) if layers > 2 else min(times)
    before, after = (round(max(times[end] / layer - 1, 0.0), 1) if layers > 1 else 0.0 for end in (0, -1))
    return Profile(sum(times), before, after)


def cut_by_cost(
    model: Transformer, placement: Placement, setup: Setup, cluster: Cluster | None = None
) -> tuple[Part, ...]:
    """Per stage its layers [start, end), so that the busiest rank has little to do: head and embedding count as what
    they cost. Raises UsageError as `profile`.

    >>> from pipeflow import GPT
    >>> cut_by_cost(GPT.named("llama3-8b"), Placement.linear(4), Setup())
    ((0, 8), (8, 16), (16, 25), (25, 32))
    """
    found = profile(model, setup, cluster)
    return cut_by_load(model.layers, placement, found.first, found.last)
