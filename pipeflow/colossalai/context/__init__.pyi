# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.processes import ParallelMode
from pipeflow.training import Config

__all__ = ["Config", "ParallelMode"]
