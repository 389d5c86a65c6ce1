"""ColossalAI's `colossalai.cluster`."""

from __future__ import annotations

from pipeflow.colossalai.cluster.dist_coordinator import DistCoordinator
from pipeflow.colossalai.cluster.process_group_mesh import ProcessGroupMesh

__all__ = ["DistCoordinator", "ProcessGroupMesh"]
