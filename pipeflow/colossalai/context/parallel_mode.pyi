# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.global_context import ParallelMode

__all__ = ["ParallelMode"]
