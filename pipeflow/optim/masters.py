"""MasterWeights: an optimizer for a model in 16 bits, which steps float32 copies of its weights (Micikevicius et al.,
2018, arXiv:1710.03740, section 3.1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipeflow.optim.clip import grad_norm
from pipeflow.optim.optimizer import Wrapper, give_states, innermost
from pipeflow.optim.scaler import LossScaler
from pipeflow.runtime.clipping import Clipping
from pipeflow.runtime.pipeline import Pipeline

LOG = logging.getLogger("pipeflow")


class MasterWeights(Wrapper):
    """Gives `optimizer` float32 masters to step in place of the model's bfloat16 or float16 parameters, which are
    rounded from them after each step. What is float32 or float64 already is its own master. Weights that something else
    changes, such as a checkpoint that is loaded without this optimizer, are taken for masters in the next step; but for
    what is written through `parameter.data`, which torch tells nobody: write to the parameter, under torch.no_grad().

    With a scaler, gradients are `model.loss_scale` times too large until `step` divides them, in float32. When any
    gradient on any rank of the world is not finite, no rank steps, and the scale is the same on all of them. All
    ranks make theirs and step together.

    Args:
        model: the pipeline.
        optimizer: made from its parameters, or a Zero of one.
        scaler: needed for float16, whose smallest gradients would be zero.

    Attributes:
        skipped: how many steps were left out. `step_was_skipped` says it of the last one:
            `if not optimizer.step_was_skipped: scheduler.step()`.

    Raises UsageError when `optimizer` steps other parameters.
    """

    model: Pipeline

    def __init__(self, model: Pipeline, optimizer: Optimizer, *, scaler: LossScaler | None = None) -> None:
        super().__init__(model, optimizer)
        self.scaler = scaler
        self.skipped = 0
        self._clipping = Clipping(self.parameters)
        model.clippings.add(self._clipping)
        self._versions: dict[nn.Parameter, int] = {}
        self._put_masters()
        self._note_versions()
        self._tell_scale()

    def _put_masters(self) -> None:
        plain, states = innermost(self), {}
        for parameter in self.stepped:
            self.stepped[parameter] = master = _master(parameter)
            states[id(master)] = plain.state.pop(parameter, {})
        for group in plain.param_groups:
            group["params"] = [self.stepped[parameter] for parameter in group["params"]]
        give_states(plain, states)  # some have them from the start
        self.share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Steps the masters and rounds the parameters from them, or skips the step where a gradient overflowed.
        Raises PipelineError as `execute_pipeline` does.
        """
        self.refuse_closure(closure)
        norm, factor = self._clipping.taken()
        factor /= self.model.loss_scale
        if self.scaler is None:
            self._step(factor)
            return
        overflow = not (grad_norm(self.model) if norm is None else norm).isfinite()
        self.step_was_skipped = overflow
        if overflow:
            self.skipped += 1
            if self.model.context.rank == 0:
                LOG.info("gradients overflowed at loss scale %g: the step is skipped", self.scaler.scale)
        else:
            self._step(factor)
        self.scaler.update(overflow=overflow)
        self._tell_scale()

    def _step(self, factor: float) -> None:
        self._read_changed()
        for parameter, master in self.stepped.items():
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
            if master.grad is not None and factor != 1:
                master.grad.mul_(factor)
        self.inner.step()
        for parameter, master in self.stepped.items():
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {each: each._version for each, master in self.stepped.items() if master is not each}

    @torch.no_grad()
    def _read_changed(self) -> None:
        """Takes weights that others than this optimizer have changed for masters."""
        for parameter, version in self._versions.items():
            master = self.stepped[parameter]
            if parameter._version != version and not torch.equal(parameter, master.to(parameter.dtype)):
                master.copy_(parameter)
        self._note_versions()

    def state_dict(self) -> dict[str, Any]:
        """As any Wrapper's, with the scaler's under "scaler"."""
        self._read_changed()
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {**super().state_dict(), **scaler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from `state_dict`; the model's parameters become its masters, rounded. Raises UsageError when it
        does not fit.
        """
        super().load_state_dict(state_dict)
        self._note_versions()
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
