"""Zero: an optimizer whose states are distributed over the data ranks, as in stage 1 of ZeRO (Rajbhandari et al., 2020,
arXiv:1910.02054, section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import is_distributed
from pipeflow.engine.runtime.gradients.step_end import share_row
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.tensor.stepping import divide
from pipeflow.training.optim.optimizer import Wrapper


class Zero(Wrapper):
    """Distributes an optimizer's states over the data ranks. Each data rank owns some parameters: it keeps their
    states, steps them, and sends the new values to the other data ranks. All data ranks call `step` together.

    Each parameter has one owner, which has all of it. So optimizers that need whole weights work, such as Muon, and
    results are bit-identical to those of one rank. For float32 masters of only the owned parameters, wrap it:
    `MasterWeights(model, Zero(model, optimizer))`.

    Args:
        model: this rank's Pipeline.
        optimizer: an optimizer of its parameters, with the same groups on every rank.

    From then on, a batch leaves the average of a parameter's gradients with its owner alone; on other data ranks
    `.grad` is None. So a step sends no more than without Zero. No other optimizer can step these parameters.

    Attributes:
        owners: the data rank that owns each parameter; of experts, its place among the ranks that hold the same ones.

    Raises UsageError if `optimizer` is a wrapper, if it has parameters that are not in the model, or if the model uses
    fully_shard. `step` raises it for an optimizer that computes a weight's step from all weights, such as LBFGS.
    """

    model: Pipeline

    def __init__(self, model: Pipeline, optimizer: Optimizer) -> None:
        if isinstance(optimizer, Wrapper):
            raise UsageError("Zero must be the inner wrapper: MasterWeights(model, Zero(model, optimizer))")
        super().__init__(model, optimizer)
        if model.context.elastic:
            raise UsageError(
                "Zero keeps the optimizer's states of each weight on one replica, and elastic=True would lose those of "
                "a rank that dies: use the optimizer without Zero, or launch without elastic=True"
            )
        if any(map(is_distributed, self.parameters)):
            raise UsageError("fully_shard already distributes the optimizer's states: use the optimizer without Zero")
        self.owners, groups = model.gradients.divide(self.parameters), model.gradients.owners
        self.stepped = {p: p for p in self.parameters if self.owners[p] == groups.group_of(p).rank}
        for group in optimizer.param_groups:
            kept = [parameter in self.stepped for parameter in group["params"]]
            group.update({key: [*compress(group[key], kept)] for key in ("params", "param_names") if key in group})
        for parameter in self.parameters:
            if parameter not in self.stepped:
                optimizer.state.pop(parameter, None)
        if groups.group.size > 1:
            divide(optimizer, model, self.parameters)
        self._buckets = [*model.gradients.owners.buckets(self.parameters)]
        self.share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Steps this rank's own parameters and exchanges the new values. Raises PipelineError if a rank fails."""
        self.refuse_closure(closure)
        with self.model.alarm.raised_everywhere():
            self.inner.step()
            groups = self.model.gradients.owners
            if groups.group.size > 1:
                room: Tensor | None = None
                if any(parameter.dtype is not bucket[0].dtype for bucket in self._buckets for parameter in bucket):
                    self._buckets = [*self.model.gradients.owners.buckets(self.parameters)]
                for bucket in self._buckets:
                    values = [self.stepped.get(parameter, parameter).to(parameter.dtype) for parameter in bucket]
                    room = share_row(bucket, values, groups.group_of(bucket[0]), self.owners[bucket[0]], room)
