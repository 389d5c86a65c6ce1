"""The names of torch.distributed.pipelining, run by pipeflow's engine: `pipeflow.pipelining` replaces
`torch.distributed.pipelining` in imports, and nothing else changes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed.pipelining as theirs
from torch.distributed.pipelining import (
    SplitPoint,
    build_stage,
    microbatch,
    pipe_split,
)

from pipeflow.adapters.pipelining import pipe
from pipeflow.adapters.pipelining.pipe import Pipe, pipeline
from pipeflow.adapters.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
)
from pipeflow.adapters.pipelining.stage import PipelineStage
from pipeflow.engine.torch_private.pipelining import backward, debug, unflatten, utils

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
for _module in (backward, debug, unflatten, utils, microbatch):  # of torch: they need no engine
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module


def __getattr__(name: str) -> Any:
    """Other names of torch's package, such as those that newer releases add."""
    return getattr(theirs, name)
