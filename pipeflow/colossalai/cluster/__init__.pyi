# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.processes import DistCoordinator, ProcessGroupMesh

__all__ = ["DistCoordinator", "ProcessGroupMesh"]
