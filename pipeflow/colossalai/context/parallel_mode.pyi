# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.processes import ParallelMode

__all__ = ["ParallelMode"]
