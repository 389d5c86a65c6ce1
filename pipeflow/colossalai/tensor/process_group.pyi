# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.tensors import ProcessGroup

__all__ = ["ProcessGroup"]
