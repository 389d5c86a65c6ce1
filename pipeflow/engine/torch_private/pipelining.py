"""The parts of torch.distributed.pipelining that programs import, although they are private by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.pipelining import stage as _stages

from pipeflow.engine.torch_private import needed

with needed():
    from torch.distributed.pipelining import (
        _IR,
        _backward,
        _debug,
        _schedule_visualizer,
        _unflatten,
        _utils,
    )
    from torch.distributed.pipelining._utils import PipeInfo
    from torch.distributed.pipelining.schedules import _Action as TorchAction
    from torch.distributed.pipelining.schedules import _ComputationType as ComputationType
    from torch.distributed.pipelining.schedules import _PipelineSchedule as PipelineSchedule
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime
    from torch.distributed.pipelining.schedules import _ScheduleForwardOnly as ScheduleForwardOnly

StageInfo: Any = getattr(_stages, "PipelineStageInfo", None)
"""Which forward runs, as contexts are told; public, since torch 2.15."""


def forward_contexts(stage: Any) -> Mapping[int, Callable[[Any], AbstractContextManager[object]]]:
    """The live contexts that `register_forward_context` gave a stage, one at most. torch 2.15 has it, and no public
    name that reads them.
    """
    found: Mapping[int, Callable[[Any], AbstractContextManager[object]]] = getattr(stage, "_forward_contexts", {})
    return found


ir = _IR
backward = _backward
debug = _debug
schedule_visualizer = _schedule_visualizer
unflatten = _unflatten
utils = _utils

__all__ = [
    "ComputationType",
    "PipeInfo",
    "PipelineSchedule",
    "PipelineScheduleRuntime",
    "ScheduleForwardOnly",
    "StageInfo",
    "TorchAction",
    "backward",
    "debug",
    "forward_contexts",
    "ir",
    "schedule_visualizer",
    "unflatten",
    "utils",
]
