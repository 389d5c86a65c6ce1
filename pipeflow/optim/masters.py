"""MasterWeights: an optimizer for a model in 16 bits, which steps float32 copies of its weights (Micikevicius et al.,
2018, arXiv:1710.03740, section 3.1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.optim.clip import clip_factor, grad_norm
from pipeflow.optim.optimizer import Wrapper, give_states, innermost
from pipeflow.optim.scaler import LossScaler
from pipeflow.runtime.pipeline import Pipeline

LOG = logging.getLogger("pipeflow")


class MasterWeights(Wrapper):
    """Gives `optimizer` float32 masters to step in place of the model's bfloat16 or float16 parameters, which are
    rounded from them after each step. What is float32 or float64 already is its own master.

    With a scaler, gradients are `model.loss_scale` times too large until `step` divides them, in float32. When any
    gradient on any rank of the world is not finite, no rank steps, and the scale is the same on all of them. All
    ranks make theirs and step together.

    Args:
        model: the pipeline.
        optimizer: made from its parameters, or a Zero of one.
        scaler: needed for float16, whose smallest gradients would be zero.

    Attributes:
        skipped: how many steps were left out.

    Raises UsageError when `optimizer` steps other parameters.
    """

    model: Pipeline

    def __init__(self, model: Pipeline, optimizer: Optimizer, *, scaler: LossScaler | None = None) -> None:
        super().__init__(model, optimizer)
        self.scaler = scaler
        self.skipped = 0
        self._norm: Tensor | None = None
        self._factor = 1.0
        self._put_masters()
        self._tell_scale()

    def _put_masters(self) -> None:
        plain, states = innermost(self), {}
        for parameter in self.stepped:
            self.stepped[parameter] = held = _master(parameter)
            states[id(held)] = plain.state.pop(parameter, {})
        for group in plain.param_groups:
            group["params"] = [self.stepped[parameter] for parameter in group["params"]]
        give_states(plain, states)  # some have them from the start
        self.share()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Has the next `step` scale its float32 gradients so that their global 2-norm is at most `max_norm`; returns
        the norm before, as `pipeflow.clip_grad_norm_` does, the loss scale taken out. All ranks call it together.

        Raises UsageError for a `max_norm` that is not positive, PipelineError as `execute_pipeline` does.
        """
        norm = grad_norm(self.model)
        self._factor = clip_factor(norm, max_norm)
        self._norm = norm
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Steps the masters and rounds the parameters from them, or skips the step where a gradient overflowed.
        Raises PipelineError as `execute_pipeline` does.
        """
        self.refuse_closure(closure)
        norm, factor = self._norm, self._factor / self.model.loss_scale
        self._norm, self._factor = None, 1.0
        if self.scaler is None:
            self._step(factor)
            return
        overflow = not (grad_norm(self.model) if norm is None else norm).isfinite()
        if overflow:
            self.skipped += 1
            if self.model.context.rank == 0:
                LOG.info("gradients overflowed at loss scale %g: the step is skipped", self.scaler.scale)
        else:
            self._step(factor)
        self.scaler.update(overflow=overflow)
        self._tell_scale()

    def _step(self, factor: float) -> None:
        for parameter, held in self.stepped.items():
            if held is not parameter:
                held.grad = None if parameter.grad is None else parameter.grad.float()
            if held.grad is not None and factor != 1:
                held.grad.mul_(factor)
        self.inner.step()
        for parameter, held in self.stepped.items():
            if held is not parameter:
                parameter.copy_(held)
                held.grad = None

    @torch.no_grad()
    def read_weights(self) -> None:
        """Takes the model's weights as they are now for masters: call it when others were loaded into the model."""
        for parameter, held in self.stepped.items():
            held.copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """As any Wrapper's, with the scaler's under "scaler"."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {**super().state_dict(), **scaler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from `state_dict`; the model's parameters become its masters, rounded. Raises UsageError when it
        does not fit.
        """
        super().load_state_dict(state_dict)
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        self._tell_scale()

    def _tell_scale(self) -> None:
        if self.scaler is not None:
            self.model.loss_scale = self.scaler.scale


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return parameter
    return nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
