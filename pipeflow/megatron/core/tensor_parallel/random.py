"""Megatron-LM's `megatron.core.tensor_parallel.random`: a seed for dropout, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipeflow.core.errors import UsageError
from pipeflow.megatron.core.parallel_state import keep_seed
from pipeflow.tensor import random, recompute

__all__ = ["checkpoint", "model_parallel_cuda_manual_seed"]


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds dropout on any device (`pipeflow.tensor.manual_seed`): tensor ranks draw alike outside split regions and
    differently inside. Also seeds the initial weights of models made afterwards, and torch's default generator of the
    GPU, but not that of the CPU, which loaders use for shuffling.
    """
    keep_seed(seed)
    random.manual_seed(seed)
    torch.cuda.manual_seed(seed)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Calls `pipeflow.tensor.checkpoint`. Raises UsageError for `distribute_saved_activations`."""
    if distribute_saved_activations:
        raise UsageError("distribute_saved_activations=True is not supported: every rank keeps its own inputs")
    return recompute.checkpoint(function, *args)
