"""What the last stage does with its output: it computes the loss, with whose gradient a backward starts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pipeflow.core.errors import UsageError
from pipeflow.engine.runtime.program.payload import BackwardState
from pipeflow.engine.runtime.program.results import Results
from pipeflow.engine.runtime.snapshots import snapshot
from pipeflow.engine.stages.scaling import Scaling
from pipeflow.engine.torch_private.trees import tree_leaves


class ToResults:
    """The sink for the last stage's output: computes the loss."""

    __slots__ = ("microbatch", "results", "state")

    def __init__(self, results: Results, microbatch: int, state: BackwardState | None) -> None:
        self.results = results
        self.microbatch = microbatch
        self.state = state

    def __call__(self, output: object) -> None:
        results, microbatch = self.results, self.microbatch
        if results.criterion is not None and results.whole is not None:
            results.whole.add(results, microbatch, output, self.state)
        elif results.criterion is not None:
            labels = results.labels[microbatch]
            if results.settle is not None:
                try:
                    results.settle(output, microbatch)
                except UsageError:
                    results.criterion(output, labels)  # raises its own error, if it has one
                    raise
            if results.scaling is not None:
                self._scale(results.scaling, results.scaling.computed(results.criterion, output, labels))
            else:
                loss = results.criterion(output, labels)
                results.losses[microbatch] = loss.detach()
                if self.state is not None and loss.requires_grad:
                    self.state.edges = [get_gradient_edge(each) for each in self._starts(loss, output)]
        if keep := results.keep_outputs:
            results.outputs[microbatch] = snapshot(keep(output) if callable(keep) else output)

    def _scale(self, scaling: Scaling, loss: Tensor) -> None:
        """Multiplies the terms of the loss, at which the backward starts then."""
        results, microbatch = self.results, self.microbatch
        results.losses[microbatch], edges, starts = scaling.scaled(loss, microbatch)
        if self.state is not None:
            results.starts[microbatch] = starts
            self.state.edges = edges

    def _starts(self, loss: Tensor, output: object) -> list[Tensor]:
        """The tensors at which the backward starts: the loss, or the output if the microbatch has no weight. The
        gradient of its loss may be infinite, as that of a mean over nothing, and 0 times that is nan.
        """
        if self.results.weights[self.microbatch]:
            return [loss]
        others = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf is not loss]
        starts = [other for other in others if other.requires_grad]
        self.results.zeros[self.microbatch] = [other.new_zeros(()).expand(other.shape) for other in starts]
        return starts


class LossGradient:
    """The gradients with which a backward starts: the weight of the microbatch's loss in the batch's mean loss; zeros
    for its output if it has no weight.
    """

    __slots__ = ("microbatch", "results")

    def __init__(self, results: Results, microbatch: int) -> None:
        self.results = results
        self.microbatch = microbatch

    def __call__(self) -> list[Tensor]:
        results = self.results
        if results.whole is not None:
            return results.whole.gradients(self.microbatch, results.gradient_scale)
        loss, weight = results.losses[self.microbatch], results.weights[self.microbatch]
        assert loss is not None
        if results.scaling is not None:
            return [each * (weight * results.gradient_scale) for each in results.starts[self.microbatch]]
        if not weight:
            return results.zeros.get(self.microbatch, [])
        return [torch.full_like(loss, weight * results.gradient_scale)]
