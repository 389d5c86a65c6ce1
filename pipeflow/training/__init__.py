"""Training: stages of a model, engines that take steps, a trainer with hooks, configuration, data, logs. In `optim` are
optimizers and clipping, in `checkpoint` saved states, in `models` a GPT for every layout.
"""

from __future__ import annotations

from pipeflow.core.errors import NonFiniteGradientError
from pipeflow.training.build import build_stages, cut_layers, measure_layers
from pipeflow.training.config import Config, read_config
from pipeflow.training.data import (
    DataParallelLoader,
    MixedLabels,
    Mixup,
    MixupAccuracy,
    MixupLoss,
    endless,
    get_dataloader,
)
from pipeflow.training.engine import Engine, NonFiniteLossError, Step
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
from pipeflow.training.launch import current_config, launch_from_config, make_engine
from pipeflow.training.layers import Registry, makers
from pipeflow.training.logging import DistributedLogger, disable_existing_loggers, get_dist_logger
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
    "MixedLabels",
    "Mixup",
    "MixupAccuracy",
    "MixupLoss",
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
