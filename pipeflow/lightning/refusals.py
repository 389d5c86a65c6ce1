"""What a PipelineStrategy refuses, each with what works instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeflow.core.errors import UsageError

_ITSELF = "pipeline ranks divide the model, tensor= divides its layers, and further processes are replicas"
PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


def require_precision(plugin: Any) -> None:
    """Raises UsageError for a precision that is not possible with a pipeline."""
    precision = getattr(plugin, "precision", None)
    if precision not in PRECISIONS or "FSDP" in type(plugin).__name__ or "DeepSpeed" in type(plugin).__name__:
        raise UsageError(
            f"precision {precision!r} of {type(plugin).__name__} is not possible with a pipeline: use one of "
            f"{', '.join(map(repr, PRECISIONS))}"
        )


def require_possible(module: Any, strategy: Any) -> None:
    """Raises UsageError for a LightningModule that a pipeline cannot train."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(
            f"{name} has automatic_optimization=False, but a pipeline runs the backwards within a step: set it to "
            "True, and return the loss from training_step; accumulate_grad_batches and gradient_clip_val are options "
            "of the Trainer"
        )
    for each in module.modules():
        if (
            isinstance(each, nn.parallel.DistributedDataParallel)
            or hasattr(each, "_get_fsdp_state")
            or ("FullyShardedDataParallel" in type(each).__name__)
        ):
            raise UsageError(f"{name} has a part that DDP or FSDP wraps, but a pipeline needs neither: {_ITSELF}")
    if getattr(strategy, "_layer_sync", None) is not None:
        raise UsageError("sync_batchnorm=True is not possible with a pipeline: a BatchNorm sees one microbatch")


def require_one(optimizers: list[Any], name: str) -> None:
    """Raises UsageError for several optimizers, and for one that computes the loss several times."""
    if len(optimizers) > 1:
        raise UsageError(
            f"{name}.configure_optimizers returned {len(optimizers)} optimizers, but a pipeline steps one: return one "
            "optimizer with several parameter groups, each with its own options"
        )
    if optimizers and isinstance(optimizers[0], torch.optim.LBFGS):
        raise UsageError(
            "LBFGS is not possible with a pipeline, since a rank has a part of the weights: use AdamW or SGD"
        )
