"""ColossalAI's `colossalai.utils`."""

from __future__ import annotations

import torch

from pipeflow.parallel.context import current_context
from pipeflow.training.data import get_dataloader
from pipeflow.training.timer import MultiTimer

__all__ = ["MultiTimer", "get_current_device", "get_dataloader", "is_using_pp"]


def get_current_device() -> torch.device:
    """Returns this process's device. Raises UsageError before `launch`."""
    return current_context().device


def is_using_pp() -> bool:
    """Returns True if the pipeline has several ranks. Raises UsageError before `launch`."""
    return current_context().pipeline_size > 1
