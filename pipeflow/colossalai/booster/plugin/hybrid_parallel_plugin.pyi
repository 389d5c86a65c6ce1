# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.plugins import HybridParallelPlugin

__all__ = ["HybridParallelPlugin"]
