# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.global_context import global_context

__all__ = ["global_context"]
