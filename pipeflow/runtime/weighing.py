"""Weighing: the weights of microbatches in the loss of a batch, by number of samples, by what a `weigh` counts, or as a
loss module reduces.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.runtime.microbatch import Batch
from pipeflow.stages.loss import Weighing, own_loss

LOG = logging.getLogger("pipeflow")

UNKNOWN_WEIGHTS = (
    "the module's own loss may not be a mean over samples or labels: the loss of a batch is computed as the mean of "
    "its microbatches' losses, weighted by their numbers of %s, and may differ from the module's loss of the whole "
    "batch; pass weigh=, a function of the labels that returns what the loss of a microbatch is divided by, such as "
    "the sum of a mask; or pass a criterion="
)
"""Warns that it could not be read from a module how its own loss weighs microbatches."""


NO_MEAN = (
    "the criterion is not a mean over samples: the loss of %d samples is %.6g, but that of its two halves gives %.6g; "
    "microbatches are weighted by their numbers of samples, so the loss of a batch and its gradients are wrong; pass "
    "weigh=, a function of the labels that returns what the loss is divided by, such as the number of labels that "
    "count: weigh=lambda labels: (labels != -100).sum()"
)
"""Warns that a criterion cannot be weighed by samples."""


class CheckedCriterion:
    """A criterion whose microbatches are weighted by samples, because nothing says what it divides by. In the first
    step it also computes the losses of both halves of each microbatch. `judge` warns unless they give the same mean.
    """

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        self.criterion = criterion
        self._found: list[tuple[int, float, Tensor]] = []
        self._is_judged = False

    def __call__(self, output: Any, labels: Any) -> Tensor:
        loss = self.criterion(output, labels)
        if not self._is_judged:
            with suppress(Exception):  # a criterion that takes no halves is not checked
                self._compute(output, labels, loss.detach())
        return loss

    def _compute(self, output: Any, labels: Any, whole: Tensor) -> None:
        tensors = [leaf for leaf in tree_leaves((output, labels)) if isinstance(leaf, Tensor)]
        [count] = {len(tensor) for tensor in tensors}
        half = count // 2
        if not half or whole.is_meta:
            return
        with torch.no_grad(), torch.random.fork_rng({each.device for each in tensors if each.device.type == "cuda"}):
            first, second = (
                self.criterion(*tree_map_only(Tensor, itemgetter(part), (output, labels)))
                for part in (slice(half), slice(half, None))
            )
        rounding = max(torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.is_floating_point())
        self._found.append((count, rounding, torch.stack([whole, (half * first + (count - half) * second) / count])))

    def judge(self) -> None:
        """Warns if the losses of the first step are no means over samples. It waits for the device, so it is called
        when the step has ended.
        """
        if not self._found:
            return
        self._is_judged = True
        for count, rounding, losses in self._found:
            whole, mean = losses.tolist()
            if math.isfinite(mean) and not math.isclose(whole, mean, rel_tol=max(4 * rounding, 1e-5), abs_tol=1e-7):
                LOG.warning(NO_MEAN, count, whole, mean)
                break
        self._found.clear()


def checked(criterion: Callable[..., Tensor] | None, context: Context) -> Callable[..., Tensor] | None:
    """The criterion of a pipeline without `weigh`, checked unless it says its `reduction` or is the module's own loss.
    Among tensor ranks, a criterion may communicate, so it is called no more often than needed.
    """
    if criterion is None or criterion is own_loss or hasattr(criterion, "reduction") or context.tensor_size > 1:
        return criterion
    return CheckedCriterion(criterion)


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
