# Written by `make stubs` from the table of the package.
from pipeflow.runtime.gradients.ties import PipelineSharedModuleWrapper

__all__ = ["PipelineSharedModuleWrapper"]
