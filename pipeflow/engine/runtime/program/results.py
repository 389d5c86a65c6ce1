"""Results: what the last stage takes from a batch, and the losses and outputs that it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeflow.engine.runtime.whole_loss import WholeLoss
from pipeflow.engine.stages.scaling import Scaling
from pipeflow.engine.torch_private.tensors import foreach_mul


class Results:
    """The criterion, labels and weights of a step for the last stage, and, for each microbatch, its loss (a scalar
    tensor) and, if kept, its output.
    """

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.clear()

    def clear(self) -> None:
        """Drops the batch, losses and outputs of the last step."""
        self.criterion: Callable[..., Tensor] | None = None
        self.labels: list[object] = []
        self.weights: list[float] = []  # of the microbatches; they add up to 1
        self.weight = 0.0  # of the batch
        self.counted = 0.0  # a digest of what the weight counts, as in Weights
        self.settle: Callable[[object, int], None] | None = None  # finds the weights once there is an output
        self.scaling: Scaling | None = None  # of a loss whose terms have different weights
        self.whole: WholeLoss | None = None  # if the loss is that of the whole batch
        self.starts: dict[int, list[Tensor]] = {}  # gradients of the terms of such losses, by microbatch
        self.gradient_scale = 1.0  # factor of the loss's gradient
        self.keep_outputs: bool | Callable[[Any], object] = False
        self.sizes: list[int] = []  # of the microbatches, if outputs must have them along dim 0
        self.losses: list[Tensor | None] = [None] * self.microbatches
        self.zeros: dict[int, list[Tensor]] = {}  # gradients of the outputs of microbatches without weight
        self.outputs: list[object] = [None] * self.microbatches

    def loss(self) -> Tensor | None:
        """The batch's mean loss, a scalar tensor, summed in microbatch order under any schedule; or None."""
        parts = self.parts()
        return torch.stack(list(parts.values())).sum() if parts else None

    def computed(self) -> dict[int, Tensor]:
        """The losses that this rank computed, by microbatch."""
        return {microbatch: loss for microbatch, loss in enumerate(self.losses) if loss is not None}

    def parts(self) -> dict[int, Tensor]:
        """The contribution of each known microbatch loss to the mean loss, in microbatch order. A microbatch of weight
        zero contributes zero, even if its loss is nan, as a mean over no tokens is.
        """
        losses = self.computed()
        weights = [self.weights[microbatch] for microbatch in losses]
        parts = foreach_mul([_wide(loss) for loss in losses.values()], weights) if losses else ()
        return {
            microbatch: part if weight else torch.zeros_like(part)
            for microbatch, part, weight in zip(losses, parts, weights, strict=True)
        }


def _wide(loss: Tensor) -> Tensor:
    """The loss in float32 at least, so that losses of many microbatches can be added up."""
    return loss if loss.dtype in _WIDE else loss.float()


_WIDE = (torch.float32, torch.float64)
