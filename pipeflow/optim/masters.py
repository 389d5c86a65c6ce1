"""MasterWeights: an optimizer for 16-bit models that steps float32 copies of the weights (Micikevicius et al., 2018,
arXiv:1710.03740, section 3.1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.optim.clip import grad_norm
from pipeflow.optim.optimizer import Wrapper, give_states, innermost
from pipeflow.optim.scaler import LossScaler
from pipeflow.runtime.clipping import Clipping
from pipeflow.runtime.pipeline import Pipeline

LOG = logging.getLogger("pipeflow")


class MasterWeights(Wrapper):
    """Wraps an optimizer so that it steps float32 copies (masters) of the model's bfloat16 or float16 parameters. After
    each step, the parameters are set to the rounded masters. float32 and float64 parameters are their own masters.

    If other code changes a parameter, such as a checkpoint loaded without this optimizer, the next step copies it to
    its master. torch does not report writes through `parameter.data`, so write to the parameter itself, under
    torch.no_grad().

    With a scaler, gradients are `model.loss_scale` times too large until `step` divides them, in float32. If any
    gradient on any rank of the world is not finite, all ranks skip the step and change the scale in the same way. All
    ranks make a MasterWeights and call `step` together.

    Args:
        model: this rank's Pipeline.
        optimizer: an optimizer of its parameters, or a Zero of one.
        scaler: loss scaler; needed for float16, in which small gradients would become zero.

    Attributes:
        skipped: number of skipped steps. For the last step see `step_was_skipped`:
            `if not optimizer.step_was_skipped: scheduler.step()`.

    Raises UsageError if `optimizer` steps other parameters.
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
        give_states(plain, states)  # some optimizers have states from the start
        self.share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Steps the masters and sets the parameters to the rounded masters. With a scaler, skips the step if a gradient
        overflowed. Raises PipelineError as `execute_pipeline` does.
        """
        self.refuse_closure(closure)
        norm, clip = self._clipping.taken()
        factor = 1 / self.model.loss_scale if clip is None else clip / self.model.loss_scale
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

    def _step(self, factor: float | Tensor) -> None:
        scales = isinstance(factor, Tensor) or factor != 1
        self._read_changed()
        for parameter, master in self.stepped.items():
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
            if master.grad is not None and scales:
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
        """Copies weights that other code changed to their masters."""
        for parameter, version in self._versions.items():
            master = self.stepped[parameter]
            if parameter._version != version and not torch.equal(parameter, master.to(parameter.dtype)):
                master.copy_(parameter)
        self._note_versions()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as `Wrapper.state_dict` does, with the scaler's state as "scaler"."""
        self._read_changed()
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {**super().state_dict(), **scaler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`, and sets the model's parameters to its rounded masters. Raises UsageError if it does
        not fit.
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
