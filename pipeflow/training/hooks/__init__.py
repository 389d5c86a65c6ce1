"""Hooks: what a `Trainer` does besides training. `Hook` is their base class."""

from __future__ import annotations

from pipeflow.training.hooks.checkpoints import CheckpointHook
from pipeflow.training.hooks.logs import LoggerHook, LogHook, MetricLogger, TensorBoardHook
from pipeflow.training.hooks.measuring import (
    AccuracyHook,
    BubbleHook,
    MemoryHook,
    MetricHook,
    RateHook,
    ThroughputHook,
    TimingHook,
)
from pipeflow.training.hooks.progress import ProgressHook
from pipeflow.training.trainer import Hook, Trainer

__all__ = [
    "AccuracyHook",
    "BubbleHook",
    "CheckpointHook",
    "Hook",
    "LogHook",
    "LoggerHook",
    "MemoryHook",
    "MetricHook",
    "MetricLogger",
    "ProgressHook",
    "RateHook",
    "TensorBoardHook",
    "ThroughputHook",
    "TimingHook",
]

Trainer.progress_hooks = (RateHook, ThroughputHook, MemoryHook, BubbleHook, ProgressHook)
