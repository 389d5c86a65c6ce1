"""The names of torch.distributed.pipelining, run by pipeflow's engine: `pipeflow.pipelining` replaces
`torch.distributed.pipelining` in imports, and nothing else changes.
"""

from __future__ import annotations

import sys

from torch.distributed.pipelining import (
    SplitPoint,
    _backward,
    _debug,
    _unflatten,
    _utils,
    build_stage,
    microbatch,
    pipe_split,
)

from pipeflow.pipelining import pipe
from pipeflow.pipelining.pipe import Pipe, pipeline
from pipeflow.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
)
from pipeflow.pipelining.stage import PipelineStage

__all__ = [
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "_ScheduleForwardOnly",
    "build_stage",
    "pipe_split",
    "pipeline",
]

sys.modules[f"{__name__}._IR"] = pipe
for _module in (_backward, _debug, _unflatten, _utils, microbatch):  # of torch: they need no engine
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
