"""Weighing: the weights of microbatches in the loss of a batch, by number of samples, by what a `weigh` counts, or as a
loss module reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.runtime.microbatch import Batch
from pipeflow.stages.loss import Weighing

UNKNOWN_WEIGHTS = (
    "the module's own loss may not be a mean over samples or labels: the loss of a batch is computed as the mean of "
    "its microbatches' losses, weighted by their numbers of %s, and may differ from the module's loss of the whole "
    "batch; pass weigh=, a function of the labels that returns what the loss of a microbatch is divided by, such as "
    "the sum of a mask; or pass a criterion="
)
"""Warns that it could not be read from a module how its own loss weighs microbatches."""


def weighing_of(criterion: object) -> Weighing | None:
    """How a criterion weighs microbatches, if it is a module that has a `reduction` and perhaps an `ignore_index`, as
    the losses of torch and of `pipeflow.tensor`. None if it is a mean over samples, or unknown.
    """
    reduction, ignored = (getattr(criterion, name, None) for name in ("reduction", "ignore_index"))
    if not isinstance(criterion, nn.Module):
        return None
    if reduction == "sum":
        return Weighing(adds=True)
    if reduction != "mean" or not isinstance(ignored, int):
        return None
    classes = criterion._buffers.get("weight") if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) else None
    return Weighing(ignored, classes=classes)


def loss_weights(
    batch: Batch, labels: Sequence[object], weigh: Callable[..., float] | None, replicas: int
) -> tuple[list[float], float]:
    """The weight of each microbatch in the batch's mean loss, and the total weight of the batch.

    Weights are fractions of the total, by number of samples or by `weigh(labels)`, such as a number of tokens. If the
    total is zero, they are all zero. Of a loss that is a sum, each microbatch has the weight 1, times the number of
    `replicas`, because their losses and gradients are averaged later; the total is 1. Raises UsageError for a weight
    that is negative or not finite.
    """
    if isinstance(weigh, Weighing):
        if weigh.adds:
            return [float(replicas)] * len(batch.sizes), 1.0
        labels = replace(batch, device=torch.device("cpu"), leaves=[]).split(batch.labels)  # one copy, if any
    weights = [float(weigh(part)) for part in labels] if weigh else [float(size) for size in batch.sizes]
    for microbatch, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise UsageError(f"weigh(labels) returned {weight} for microbatch {microbatch}: a weight must be 0 or more")
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights], total
