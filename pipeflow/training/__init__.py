"""Training: stages of a model, engines that take steps, a trainer with hooks, configuration, data, logs."""

from __future__ import annotations

from pipeflow.core.errors import NonFiniteGradientError
from pipeflow.training.config.engine import make_engine
from pipeflow.training.config.launch import current_config, launch_from_config
from pipeflow.training.config.schema import Config, read_config
from pipeflow.training.data.loader import DataParallelLoader, endless, get_dataloader
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
from pipeflow.training.logging import DistributedLogger, disable_existing_loggers, get_dist_logger
from pipeflow.training.loop.engine import Engine, Step
from pipeflow.training.loop.finite import NonFiniteLossError
from pipeflow.training.loop.trainer import Trainer
from pipeflow.training.model.build import build_stages, cut_layers
from pipeflow.training.model.measure import measure_layers
from pipeflow.training.model.registry import Registry, makers
from pipeflow.training.timer import MultiTimer, Timer

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
