# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.global_context import DistCoordinator
from pipeflow.colossalai.process_group_mesh import ProcessGroupMesh

__all__ = ["DistCoordinator", "ProcessGroupMesh"]
