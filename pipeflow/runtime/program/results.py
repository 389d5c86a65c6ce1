"""Results: what the last stage needs of a batch, and the losses and outputs that it makes of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Results:
    """What the last stage needs of the batch and makes of it: per microbatch its loss, a scalar, and
    its output if asked.
    """

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.clear()

    def clear(self) -> None:
        """Lets go of the last step's batch, losses and outputs."""
        self.criterion: Callable[..., Tensor] | None = None
        self.labels: list[object] = []
        self.weights: list[float] = []  # of the microbatches; they add up to 1
        self.weight = 0.0  # of the batch
        self.gradient_scale = 1.0  # what the loss is multiplied by where its gradient starts
        self.keep_outputs = False
        self.losses: list[Tensor | None] = [None] * self.microbatches
        self.outputs: list[object] = [None] * self.microbatches

    def loss(self) -> Tensor | None:
        """The batch's mean loss, a scalar, summed in microbatch order under any schedule; None where there is none."""
        parts = self.parts()
        return torch.stack(list(parts.values())).sum() if parts else None

    def computed(self) -> dict[int, Tensor]:
        """The losses that this rank computed, by microbatch."""
        return {microbatch: loss for microbatch, loss in enumerate(self.losses) if loss is not None}

    def parts(self) -> dict[int, Tensor]:
        """Per microbatch whose loss is known here, its part of the mean loss, in microbatch order. What weighs nothing
        adds nothing, even where its loss is no number, like the mean over no tokens.
        """
        weights = self.weights
        return {
            microbatch: _wide(loss) * weight if (weight := weights[microbatch]) else torch.zeros_like(_wide(loss))
            for microbatch, loss in self.computed().items()
        }


def _wide(loss: Tensor) -> Tensor:
    """In float32 at least, in which those of many microbatches can be added up."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
