"""Training: stages of a model, engines that take steps, a trainer with hooks, configuration, data, logs."""

from __future__ import annotations

from pipeflow.training.build import build_stages, cut_layers
from pipeflow.training.config import Config, read_config
from pipeflow.training.configured import make_engine
from pipeflow.training.data import DataParallelLoader, endless, get_dataloader
from pipeflow.training.engine import Engine, Step
from pipeflow.training.finite import NonFiniteGradientError, NonFiniteLossError
from pipeflow.training.hooks import (
    AccuracyHook,
    BubbleHook,
    CheckpointHook,
    Hook,
    LoggerHook,
    LogHook,
    MemoryHook,
    MetricHook,
    MetricLogger,
    ProgressHook,
    RateHook,
    TensorBoardHook,
    ThroughputHook,
    TimingHook,
)
from pipeflow.training.launch import current_config, launch_from_config
from pipeflow.training.logging import DistributedLogger, disable_existing_loggers, get_dist_logger
from pipeflow.training.measure import measure_layers
from pipeflow.training.registry import Registry, makers
from pipeflow.training.timer import MultiTimer, Timer
from pipeflow.training.trainer import Trainer

__all__ = [
    "AccuracyHook",
    "BubbleHook",
    "CheckpointHook",
    "Config",
    "DataParallelLoader",
    "DistributedLogger",
    "Engine",
    "Hook",
    "LogHook",
    "LoggerHook",
    "MemoryHook",
    "MetricHook",
    "MetricLogger",
    "MultiTimer",
    "NonFiniteGradientError",
    "NonFiniteLossError",
    "ProgressHook",
    "RateHook",
    "Registry",
    "Step",
    "TensorBoardHook",
    "ThroughputHook",
    "Timer",
    "TimingHook",
    "Trainer",
    "build_stages",
    "current_config",
    "cut_layers",
    "disable_existing_loggers",
    "endless",
    "get_dataloader",
    "get_dist_logger",
    "launch_from_config",
    "make_engine",
    "makers",
    "measure_layers",
    "read_config",
]
