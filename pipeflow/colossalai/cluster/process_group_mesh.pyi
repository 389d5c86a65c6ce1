# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.process_group_mesh import ProcessGroupMesh

__all__ = ["ProcessGroupMesh"]
