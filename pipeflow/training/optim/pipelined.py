"""PipelinedOptimizer: the optimizer's step as a part of the schedule (Qi et al., 2023, arXiv:2401.10241, section 4).
Must not contain: when other ranks confirm a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.core.errors import NonFiniteGradientError, UsageError
from pipeflow.engine.runtime.confirmation import scale_gradients
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.tensor.stepping import plain_step, stepping_of
from pipeflow.training.optim.clip import clip_factor, norms_of, require_checks, whole_norm
from pipeflow.training.optim.optimizer import Wrapper, options_of, require_no_closure, require_parameters_of


class PipelinedOptimizer:
    """Steps the weights of each stage within `execute_pipeline`, where the schedule has the optimizer's step (S). See
    `pipeflow.with_optimizer_step`.

    A rank steps its weights when its own gradients are complete, and begins the next batch while other ranks still
    compute the last one. When all ranks have ended the step, each of them learns the norm of the whole gradient: before
    its first backward of the next batch. If the norm is too large, the step is undone and taken again with clipped
    gradients, and the forwards that have begun run again. Weights are therefore equal in every bit to those of
    `clip_grad_norm_` and `optimizer.step()`. After such a step, the next one waits for its norm at its end.

    To undo a step, a rank keeps a copy of its weights and of the optimizer's states until the step is confirmed. It
    keeps none if neither `clip_grad_norm` nor `non_finite` needs the norm.

    `execute_pipeline` clears the gradients, so nothing else is to be called between two batches than a learning-rate
    scheduler. With `broadcast_loss`, `trace`, replicas, or a stage on two ranks, all ranks end a step together, and it
    is confirmed there.

    Args:
        model: this rank's Pipeline.
        optimizer: an optimizer of torch for its parameters, or another one that steps each weight by itself.
        clip_grad_norm: maximum norm of the whole model's gradient; 0 disables clipping.
        non_finite: what to do if the gradient of a step is infinite or NaN. "stop" undoes the step and raises
            NonFiniteGradientError, on all ranks. "skip" undoes it. "ignore" checks nothing, or if it clips, takes the
            step with the gradient as it is.

    Attributes:
        grad_norm: norm of the gradient of the last confirmed step before clipping, a float64 scalar; None if it is not
            computed.
        steps: number of confirmed steps.
        undone: number of those that were clipped or skipped after they had been taken.
        skipped: number of those that were skipped.

    Raises UsageError for an optimizer that wraps another one (Zero, MasterWeights), that needs a closure, or that
    computes the step of a weight from other weights; for parameters that are not the model's; for tensor ranks with an
    optimizer of whole weights; and for arguments out of range.
    """

    def __init__(
        self,
        model: Pipeline,
        optimizer: Optimizer,
        *,
        clip_grad_norm: float = 0.0,
        non_finite: Literal["stop", "skip", "ignore"] = "stop",
    ) -> None:
        _require_fitting(model, optimizer)
        require_checks(clip_grad_norm, non_finite)
        self.model = model
        self.optimizer = optimizer
        self.clip_grad_norm = clip_grad_norm
        self.non_finite = non_finite
        self.grad_norm: Tensor | None = None
        self.steps = self.undone = self.skipped = 0
        self.may_run_ahead = True
        self._gradients: dict[nn.Parameter, Tensor] = {}  # of the step that is not confirmed
        self._norms: Tensor | None = None  # of these
        self._undo: list[Callable[[], None]] = []  # what it has changed
        self._options: list[dict[str, Any]] = []  # of the groups, with which it was taken
        self._is_taken = False
        with model.alarm.raised_everywhere():
            model.runner.confirmation.use(self)

    def confirm(self) -> None:
        """Waits until all ranks have confirmed the last step, so that the weights are final. Call it on all ranks
        before reading weights or states in another way than by `state_dict` or `save_checkpoint`, and after the last
        step. After an error of `execute_pipeline`, `steps` then says after which batch all ranks can go on. Raises
        NonFiniteGradientError, and PipelineError as `execute_pipeline` does.
        """
        with self.model.alarm.raised_everywhere():
            self.model.runner.confirmation.confirm()

    @property
    def can_undo(self) -> bool:
        """Whether it keeps copies with which a step is undone."""
        return self.clip_grad_norm > 0 or self.non_finite != "ignore"

    def begin(self) -> None:
        """Called before the first operation of a step. Raises UsageError for gradients of an earlier call, and for a
        loss scale.
        """
        if self.model.loss_scale != 1:
            raise UsageError(
                "a PipelinedOptimizer steps before the norm of the gradients is known, so it cannot divide them by a "
                f"loss scale ({self.model.loss_scale:g}): train in bfloat16, or step after execute_pipeline"
            )
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise UsageError(
                "there are gradients of an earlier call, but a schedule with the optimizer's steps (S) steps after "
                "every batch: clear them with zero_grad(), or accumulate with the schedule without these steps"
            )

    @torch.no_grad()
    def step(self, stage: int) -> None:
        """Called when all gradients of this rank are complete."""
        if self._norms is None:
            none = torch.zeros(2, dtype=torch.float64, device=self.model.context.device)
            self._norms = norms_of(self.model, 2.0, {}) if self.can_undo else none
            self._options = [_copied(options_of(group)) for group in self.optimizer.param_groups]
            self._is_taken = self.may_run_ahead
        owned = {id(each) for each in self.model.gradients.parameters_of(stage)}
        known = [each for group in self.optimizer.param_groups for each in group["params"] if id(each) in owned]
        gradients = {each: each.grad for each in known if each.grad is not None}
        self._gradients |= gradients
        if self._is_taken:
            if self.can_undo:
                self._undo += [_undoing(each, self.optimizer) for each in gradients]
            self._take(gradients)
        for parameter in self.model.gradients.parameters_of(stage):
            parameter.grad = None

    def norms(self) -> Tensor:
        """The norms of this rank's gradients, those that it counts and those that another rank counts."""
        assert self._norms is not None  # every rank has a stage, which it steps
        return self._norms

    @torch.no_grad()
    def judge(self, norms: Tensor) -> bool:
        """Confirms the step with the norms of all ranks; undoes it and takes it again if it was wrong."""
        finite = bool(norms.isfinite().all())
        self.grad_norm = whole_norm(norms, 2.0)
        factor = clip_factor(self.grad_norm, self.clip_grad_norm) if self.clip_grad_norm else None
        clips = factor is not None and bool(factor != 1)
        skips = not finite and self.non_finite != "ignore"
        stands, was_taken = not (clips or skips), self._is_taken
        if was_taken and not stands:
            self.undone += 1
            self._restore()
        if not skips and not (was_taken and stands):
            if clips and factor is not None:
                scale_gradients(self._gradients.values(), factor)
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient
            try:
                self._take(self._gradients)
            finally:
                for parameter in self._gradients:
                    parameter.grad = None
        self.may_run_ahead = stands
        if not self.can_undo:
            self.grad_norm = None
        self._forget()
        if skips and self.non_finite == "stop":
            raise NonFiniteGradientError(self.steps)
        self.steps += 1
        self.skipped += skips
        return stands or not was_taken

    @torch.no_grad()
    def undo(self) -> None:
        """Undoes the step that is not confirmed, and clears the gradients that a failed call has left."""
        self._restore()
        self._forget()
        self.model.zero_grad()

    def _take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Steps these parameters with the options that the optimizer had at the end of the batch, such as its learning
        rate. They must not change in it, since a rank steps stage by stage.
        """
        optimizer, stepped = self.optimizer, {id(each) for each in parameters}
        groups = optimizer.param_groups
        taken = optimizer.param_groups = [
            {**_copied(options), "params": [each for each in group["params"] if id(each) in stepped]}
            for group, options in zip(groups, self._options, strict=True)
        ]
        try:
            plain_step(optimizer)(optimizer)
        finally:
            optimizer.param_groups = groups
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for learning-rate schedulers, which warn otherwise
        for old, group in zip(self._options, taken, strict=True):
            if changed := [name for name, value in options_of(group).items() if not _is_same(value, old.get(name))]:
                raise UsageError(
                    f"{type(optimizer).__name__} changes {changed[0]!r} of its groups in a step, which cannot be taken "
                    "stage by stage: step it after execute_pipeline, with the schedule without the optimizer's steps"
                )

    def _restore(self) -> None:
        for undo in self._undo:
            undo()

    def _forget(self) -> None:
        self._gradients, self._undo, self._options, self._norms, self._is_taken = {}, [], [], None, False


def _undoing(parameter: nn.Parameter, optimizer: Optimizer) -> Callable[[], None]:
    """A function that gives a parameter and its states the values that they have now."""
    value, state = parameter.detach().clone(), optimizer.state.get(parameter)
    state = None if state is None else _copied(state)

    def undo() -> None:
        parameter.copy_(value)
        if state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = state

    return undo


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else deepcopy(value) for name, value in values.items()
    }


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)


def _require_fitting(model: Pipeline, optimizer: Optimizer) -> None:
    """Raises UsageError for an optimizer whose step cannot be taken stage by stage."""
    if not isinstance(model, Pipeline):
        raise UsageError(f"a PipelinedOptimizer steps a pipeflow.Pipeline, got {type(model).__name__}")
    require_parameters_of(model, optimizer)
    name = type(optimizer).__name__
    if isinstance(optimizer, Wrapper):
        raise UsageError(
            f"a PipelinedOptimizer cannot step a {name}, which changes more than the weights of a stage: give it the "
            "optimizer inside, or step after execute_pipeline"
        )
    require_no_closure(optimizer)
    if not stepping_of(optimizer).is_elementwise and model.context.tensor_size > 1:
        raise UsageError(
            f"{name} needs whole weights, but tensor ranks have parts of them: step it after execute_pipeline, or use "
            "an elementwise optimizer such as AdamW"
        )
