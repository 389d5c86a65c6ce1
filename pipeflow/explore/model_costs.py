"""Modelled: a model on a cluster, which prices schedules in seconds and bytes. Must not contain: the prices, which are
those of `planning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

from pipeflow.core.cost import CostModel
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.catalog import model_named
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.estimate import plan
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import physical_costs
from pipeflow.planning.setup import PRECISIONS, Setup
from pipeflow.planning.sharding import require_pipeline
from pipeflow.planning.step_plan import Plan


@final
@dataclass(frozen=True, slots=True)
class Modelled:
    """A model in a layout on a cluster.

    Attributes:
        model: its sizes.
        setup: the layout of a stage, and what is kept.
        cluster: the devices.
    """

    model: Transformer
    setup: Setup
    cluster: Cluster

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Modelled | None:
        """From the values of a link's fields; None if they name no model. Raises UsageError for values that do not fit
        each other.
        """
        if "model" not in values:
            return None
        setup = Setup(
            tensor=values["tensor"],
            data=values["data"],
            microbatch_size=values["microbatch_size"],
            precision=PRECISIONS[values["precision"]],
            checkpoint=values["checkpoint"],
            zero=int(values["zero"]),
            sequence_parallel="sequence_parallel" in values,
        )
        cluster = Cluster.of(
            values["device"],
            devices_per_node=values["devices_per_node"],
            link_bandwidth=values.get("link_bandwidth"),
            network_bandwidth=values.get("network_bandwidth"),
        )
        return cls(model_named(values["model"]), setup, cluster)

    def cost_model(self, placement: Placement) -> CostModel:
        """The costs of the stages of `placement`, in seconds and bytes. Raises UsageError for a model that cannot be
        laid out so.
        """
        return _cost_model(self, placement)

    def plan(self, schedule: Schedule) -> Plan:
        """The time and the memory of a step."""
        return plan(self.model, schedule, self.setup, cluster=self.cluster)


@lru_cache(64)
def _cost_model(modelled: Modelled, placement: Placement) -> CostModel:
    require_pipeline(modelled.setup.zero, placement.num_ranks)
    mesh = Mesh.of(modelled.setup, placement.num_ranks, modelled.cluster.devices_per_node)
    return physical_costs(modelled.model, placement, modelled.setup, mesh, modelled.cluster).cost
