"""Training: what a loop around `execute_pipeline` needs besides an optimizer: configuration, data, logs."""

from __future__ import annotations

from pipeflow.training.config import Config, read_config
from pipeflow.training.data import DataParallelLoader, endless, get_dataloader
from pipeflow.training.launch import current_config, launch_from_config
from pipeflow.training.logging import DistributedLogger, disable_existing_loggers, get_dist_logger
from pipeflow.training.registry import Registry
from pipeflow.training.timer import MultiTimer, Timer

__all__ = [
    "Config",
    "DataParallelLoader",
    "DistributedLogger",
    "MultiTimer",
    "Registry",
    "Timer",
    "current_config",
    "disable_existing_loggers",
    "endless",
    "get_dataloader",
    "get_dist_logger",
    "launch_from_config",
    "read_config",
]
