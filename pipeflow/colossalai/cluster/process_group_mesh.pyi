# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.processes import ProcessGroupMesh

__all__ = ["ProcessGroupMesh"]
