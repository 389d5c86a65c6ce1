# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.plugins import HybridParallelPlugin as DPPluginBase

__all__ = ["DPPluginBase"]
