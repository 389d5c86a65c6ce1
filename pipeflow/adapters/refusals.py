"""What no adapter can do, each with what works instead. Must not contain: options of one library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

from pipeflow.core.errors import UsageError

DIVIDED = "pipeline= and tensor= divide the model, and further processes are replicas"
"""Instead of what divides models in other engines."""


def require_unwrapped(module: nn.Module) -> None:
    """Raises UsageError for a module that other engines divide or wrap, or with such a part."""
    for each in module.modules():
        if isinstance(each, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            name = type(module).__name__
            where = f"the model is a {name}, which" if each is module else f"{name} has a part that"
            raise UsageError(
                f"{where} DDP or FSDP wraps, but a pipeline needs neither: {DIVIDED}, whose gradients it averages; "
                "pass the module itself"
            )


def require_one_optimizer(optimizers: Sequence[Any], who: str) -> None:
    """Raises UsageError for several optimizers, and for one that computes the loss several times."""
    if len(optimizers) > 1:
        raise UsageError(
            f"{who} has {len(optimizers)} optimizers, but a pipeline steps one: use one optimizer with several "
            'parameter groups, each with its own options, such as AdamW([{"params": first, "lr": 1e-3}, '
            '{"params": second, "lr": 1e-4}])'
        )
    if optimizers and isinstance(optimizers[0], LBFGS):
        raise UsageError(
            "LBFGS is not possible with a pipeline, since a rank has a part of the weights: use AdamW or SGD"
        )
