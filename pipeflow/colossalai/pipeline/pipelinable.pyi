# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.builders import PipelinableContext, PipelinableModel

__all__ = ["PipelinableContext", "PipelinableModel"]
