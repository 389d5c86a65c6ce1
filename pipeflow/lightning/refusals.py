"""What a PipelineStrategy refuses, each with what works instead."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import nn

from pipeflow.core.errors import UsageError

_ITSELF = "pipeline ranks divide the model, tensor= divides its layers, and further processes are replicas"
PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


def require_precision(plugin: Any) -> None:
    """Raises UsageError for a precision that is not possible with a pipeline."""
    precision, name = getattr(plugin, "precision", None), type(plugin).__name__
    if precision not in PRECISIONS or "FSDP" in name or "DeepSpeed" in name:
        raise UsageError(
            f"precision {precision!r} of {name} is not possible with a pipeline: use one of "
            f"{', '.join(map(repr, PRECISIONS))}"
        )


def mixed_of(plugin: Any) -> torch.dtype | None:
    """The dtype of the autocast that a precision asks for."""
    return torch.bfloat16 if plugin.precision == "bf16-mixed" else None


def require_possible(module: Any, strategy: Any) -> None:
    """Raises UsageError for a LightningModule that a pipeline cannot train."""
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} has automatic_optimization=False, but a pipeline runs the backwards within a "
            "step: set it to True, and return the loss from training_step; accumulate_grad_batches and "
            "gradient_clip_val are options of the Trainer"
        )
    require_unwrapped(module)
    if getattr(strategy, "_layer_sync", None) is not None:
        raise UsageError(
            "sync_batchnorm=True is not possible with a pipeline, where a BatchNorm sees one microbatch: remove it, "
            "or use GroupNorm or LayerNorm"
        )


def require_callbacks(callbacks: list[Any]) -> None:
    """Raises UsageError for a callback that needs the weights of the whole module while it trains."""
    for each in callbacks:
        name = type(each).__name__
        if isinstance(each, StochasticWeightAveraging | WeightAveraging):
            raise UsageError(
                f"{name} averages the whole module, of which a rank trains a part: keep the checkpoint of every epoch, "
                "ModelCheckpoint(save_top_k=-1), and average the weights that pipeflow.load_checkpoint loads from them"
            )
        if isinstance(each, BaseFinetuning):
            raise UsageError(
                f"{name} adds parameters to the optimizer during a run, but a pipeline trains those that it had at the "
                "first batch: set requires_grad in the module, and train a second module, loaded with "
                "pipeflow.load_checkpoint from the first one's checkpoint, in which more of them have it"
            )
        if isinstance(each, ModelPruning):
            raise UsageError(
                f"{name} prunes the whole module, of which a rank trains a part: prune a module that "
                "pipeflow.load_checkpoint loaded from the checkpoint of a run"
            )


def require_unwrapped(module: nn.Module) -> None:
    """Raises UsageError for a module with parts that other engines divide."""
    for each in module.modules():
        is_divided = hasattr(each, "_get_fsdp_state") or "FullyShardedDataParallel" in type(each).__name__
        if is_divided or isinstance(each, nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"{type(module).__name__} has a part that DDP or FSDP wraps, but a pipeline needs neither: {_ITSELF}"
            )


def require_one(optimizers: list[Any], name: str) -> None:
    """Raises UsageError for several optimizers, and for one that computes the loss several times."""
    if len(optimizers) > 1:
        raise UsageError(
            f"{name} has {len(optimizers)} optimizers, but a pipeline steps one: use one optimizer with several "
            "parameter groups, each with its own options"
        )
    if optimizers and isinstance(optimizers[0], torch.optim.LBFGS):
        raise UsageError(
            "LBFGS is not possible with a pipeline, since a rank has a part of the weights: use AdamW or SGD"
        )
