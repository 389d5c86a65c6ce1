# Written by `make stubs` from the table of the package.
from pipeflow.engine.runtime.gradients.weights import PipelineSharedModuleWrapper

__all__ = ["PipelineSharedModuleWrapper"]
