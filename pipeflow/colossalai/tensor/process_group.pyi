# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.tensor_specs import ProcessGroup

__all__ = ["ProcessGroup"]
