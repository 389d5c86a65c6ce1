# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layer_list import PipelinableContext, PipelinableModel

__all__ = ["PipelinableContext", "PipelinableModel"]
