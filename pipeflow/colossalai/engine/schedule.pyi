# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.engines import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule

__all__ = ["InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule"]
