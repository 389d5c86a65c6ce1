"""Training: what a loop around `execute_pipeline` needs, from the configuration to the optimizer's step."""

from __future__ import annotations

from pipeflow.parallel.global_context import ParallelMode, global_context
from pipeflow.training.checkpoint.files import latest_checkpoint
from pipeflow.training.checkpoint.load import Loaded, load_checkpoint
from pipeflow.training.checkpoint.save import Saving, save_checkpoint
from pipeflow.training.clip import clip_grad_norm_, grad_norm
from pipeflow.training.config import Config, read_config
from pipeflow.training.data import DataParallelLoader, endless, get_dataloader
from pipeflow.training.launch import get_default_parser, launch, launch_from_torch
from pipeflow.training.logging import DistributedLogger, disable_existing_loggers, get_dist_logger
from pipeflow.training.masters import MasterWeights
from pipeflow.training.optimizer import load_named_state, named_state
from pipeflow.training.precision import AMP_TYPE, HalfPrecision
from pipeflow.training.scaler import LossScaler
from pipeflow.training.zero import Zero

__all__ = [
    "AMP_TYPE",
    "Config",
    "DataParallelLoader",
    "DistributedLogger",
    "HalfPrecision",
    "Loaded",
    "LossScaler",
    "MasterWeights",
    "ParallelMode",
    "Saving",
    "Zero",
    "clip_grad_norm_",
    "disable_existing_loggers",
    "endless",
    "get_dataloader",
    "get_default_parser",
    "get_dist_logger",
    "global_context",
    "grad_norm",
    "latest_checkpoint",
    "launch",
    "launch_from_torch",
    "load_checkpoint",
    "load_named_state",
    "named_state",
    "read_config",
    "save_checkpoint",
]
"""Training on top of the engine: precision, optimizers, clipping, checkpoints, data."""
