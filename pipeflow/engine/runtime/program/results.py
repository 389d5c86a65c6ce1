"""Results: what the last stage takes from a batch, the loss that it computes from its output, and the gradients with
which the backwards of a batch start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.program.slots import snapshot
from pipeflow.engine.runtime.whole_loss import WholeLoss
from pipeflow.engine.stages.scaling import Scaling
from pipeflow.engine.torch_private.tensors import foreach_mul
from pipeflow.engine.torch_private.trees import tree_leaves


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

    def take(self, microbatch: int, output: object, *, training: bool) -> list[GradientEdge]:
        """Computes the loss of a microbatch from the last stage's output. Returns the edges at which its backward
        starts.
        """
        edges = [] if self.criterion is None else self._computed(self.criterion, microbatch, output, training)
        if keep := self.keep_outputs:
            self.outputs[microbatch] = snapshot(keep(output) if callable(keep) else output)
        return edges

    def _computed(
        self, criterion: Callable[..., Tensor], microbatch: int, output: object, training: bool
    ) -> list[GradientEdge]:
        if self.whole is not None:
            edges, loss = self.whole.add(criterion, microbatch, output, training=training)
            if loss is not None:
                self.losses[microbatch] = loss
            return edges
        labels = self.labels[microbatch]
        if self.settle is not None:
            try:
                self.settle(output, microbatch)
            except UsageError:
                criterion(output, labels)  # raises its own error, if it has one
                raise
        if self.scaling is not None:  # the backward starts at the terms of the loss
            of_terms = self.scaling.computed(criterion, output, labels)
            self.losses[microbatch], edges, starts = self.scaling.scaled(of_terms, microbatch)
            if training:
                self.starts[microbatch] = starts
            return edges
        loss = criterion(output, labels)
        self.losses[microbatch] = loss.detach()
        if not training or not loss.requires_grad:
            return []
        if self.weights[microbatch]:
            return [get_gradient_edge(loss)]
        # without weight it starts at the output: the loss's gradient may be infinite, as of a mean over nothing
        others = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf is not loss]
        wanted = [other for other in others if other.requires_grad]
        self.zeros[microbatch] = [other.new_zeros(()).expand(other.shape) for other in wanted]
        return [get_gradient_edge(each) for each in wanted]

    def gradients(self, microbatch: int) -> list[Tensor]:
        """The gradients with which a backward starts: the weight of the microbatch's loss in the batch's mean loss;
        zeros for its output if it has no weight.
        """
        if self.whole is not None:
            return self.whole.gradients(microbatch, self.gradient_scale)
        loss, weight = self.losses[microbatch], self.weights[microbatch]
        assert loss is not None
        if self.scaling is not None:
            return [each * (weight * self.gradient_scale) for each in self.starts[microbatch]]
        if not weight:
            return self.zeros.get(microbatch, [])
        return [torch.full_like(loss, weight * self.gradient_scale)]

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
