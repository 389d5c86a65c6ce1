"""Results: what the last stage takes from a batch, and the losses and outputs that it computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
        self.gradient_scale = 1.0  # factor of the loss's gradient
        self.keep_outputs = False
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
        parts = torch._foreach_mul([_wide(loss) for loss in losses.values()], weights) if losses else ()
        return {
            microbatch: part if weight else torch.zeros_like(part)
            for microbatch, part, weight in zip(losses, parts, weights, strict=True)
        }


def _wide(loss: Tensor) -> Tensor:
    """The loss in float32 at least, so that losses of many microbatches can be added up."""
    return loss if loss.dtype in _WIDE else loss.float()


_WIDE = (torch.float32, torch.float64)
