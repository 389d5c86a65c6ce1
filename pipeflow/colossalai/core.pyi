# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.processes import global_context

__all__ = ["global_context"]
