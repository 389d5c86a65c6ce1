"""ColossalAI's `colossalai.trainer.hooks`."""

from __future__ import annotations

from pipeflow.colossalai.trainer.hooks.base import BaseHook
from pipeflow.colossalai.trainer.hooks.checkpoints import SaveCheckpointHook
from pipeflow.colossalai.trainer.hooks.logs import (
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
)
from pipeflow.colossalai.trainer.hooks.metrics import AccuracyHook, LossHook
from pipeflow.colossalai.trainer.hooks.rates import LRSchedulerHook, ThroughputHook
from pipeflow.colossalai.trainer.hooks.tensorboard import TensorboardHook
from pipeflow.colossalai.trainer.hooks.timing import LogTimingByEpochHook

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
]
