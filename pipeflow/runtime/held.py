"""held_step: a training step whose gradients wait beside `.grad` until the backward of its loss is called, for loops
in which a forward and a backward are two calls. Must not contain: the step itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.runtime.execution import execute_pipeline
from pipeflow.runtime.pipeline import Pipeline


class HeldStep:
    """A step that has run, and whose gradients `loss.backward()` adds to `.grad`.

    Args:
        held: the gradients of the step, times `scale`, by parameter.
        loss: the mean loss of its batch, a scalar tensor without a graph.
        scale: factor that the gradients have already.
        outputs: the last stage's outputs, as in `Output`.

    Attributes:
        outputs: as given.
        loss: the same number, with a graph that leads to the gradients. A loss computed from it, such as `loss / 2`,
            scales them.
        is_released: True once they are in `.grad`.
    """

    def __init__(
        self, held: list[tuple[nn.Parameter, Tensor]], loss: Tensor, scale: float, outputs: object = None
    ) -> None:
        self._held = held
        self.outputs = outputs
        self._scale = scale
        self.is_released = False
        anchor = torch.zeros((), requires_grad=True, device=loss.device)
        with torch.enable_grad():
            self.loss: Tensor = _Releasing.apply(anchor, loss, self)  # type: ignore[no-untyped-call]  # torch's

    def release(self, factor: float | Tensor = 1.0) -> None:
        """Adds the gradients, times `factor`, to `.grad`. Raises UsageError if it was called before."""
        if self.is_released:
            raise UsageError("the backward of this step's loss was called before: call it once for each batch")
        self.is_released = True
        gradients = [gradient for _, gradient in self._held]
        if gradients and (isinstance(factor, Tensor) or factor != 1.0):
            torch._foreach_mul_(gradients, factor)
        for parameter, gradient in self._held:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = []

    def release_by(self, gradient: Tensor) -> None:
        """Like `release`, with the gradient of what the caller differentiates with respect to `loss` as factor."""
        self.release(gradient / self._scale)


class _Releasing(torch.autograd.Function):
    """The loss of a step that has run; its backward releases the gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, step: HeldStep) -> Tensor:
        ctx.step = step
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.step.release_by(gradients[0])
        return None, None, None


def held_step(
    data_iter: Iterator[object],
    model: Pipeline,
    *,
    schedule: Schedule | None = None,
    gradient_scale: float = 1.0,
    return_outputs: bool = False,
) -> HeldStep:
    """Runs one training step like `execute_pipeline`, and holds its gradients back: `.grad` is as before, until the
    backward of `HeldStep.loss`, or `release`. The loss is known on every rank.

    Args:
        data_iter, model, schedule, return_outputs: as in `execute_pipeline`.
        gradient_scale: factor that the gradients get within the step, where it costs nothing: pass the one that
            the gradient of the loss will have. `release()` then adds them as they are.

    Raises the errors of `execute_pipeline`.
    """
    earlier = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in earlier:
        parameter.grad = None
    try:
        output = execute_pipeline(
            data_iter,
            model,
            broadcast_loss=True,
            schedule=schedule,
            gradient_scale=gradient_scale,
            return_outputs=return_outputs,
        )
        held = [(parameter, parameter.grad) for parameter, _ in earlier if parameter.grad is not None]
    finally:
        for parameter, gradient in earlier:
            parameter.grad = gradient
    assert output.loss is not None, "it was broadcast"
    return HeldStep(held, output.loss, gradient_scale, output.outputs)
