"""The check that the losses and the gradient of a step are finite, and the errors it raises. Must not contain: what
happens to the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeflow.core.errors import NonFiniteError, NonFiniteGradientError
from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.runtime.step import Output


class NonFiniteLossError(NonFiniteError):
    """The loss of a batch is infinite or NaN.

    Args:
        loss: the loss.
        step: number of steps taken before this one.
        microbatch: index of the first microbatch with such a loss; None if only the sum of the losses is not finite.

    `step` and `microbatch` are attributes, too.
    """

    def __init__(self, loss: float, step: int, microbatch: int | None) -> None:
        where = "" if microbatch is None else f", first in microbatch {microbatch}"
        advice = "look at its data, lower the learning rate, clip gradients"
        super().__init__(f"the loss is {loss} in step {step}{where}", advice, step)
        self.microbatch = microbatch


def check_finite(
    outputs: Sequence[Output], norm: Tensor | None, step: int, context: Context
) -> tuple[float | None, NonFiniteError | None]:
    """Reads the losses of a step's batches and the `norm` of its gradient, all at once. Returns the mean loss, None
    without batches, and the error that names the first number that is not finite, the same on all ranks.
    """
    losses = [_broadcast_loss(output) for output in outputs]
    numbers = [*losses, *([mean_loss(outputs)] if losses else []), *([] if norm is None else [norm])]
    read: list[float] = torch.stack([number.double() for number in numbers]).tolist() if numbers else []
    mean = read[len(losses)] if losses else None
    for output, loss in zip(outputs, read, strict=False):
        if not math.isfinite(loss):
            return mean, NonFiniteLossError(loss, step, _first_spoiled(output, context))
    return mean, None if all(map(math.isfinite, read)) else NonFiniteGradientError(step)


def mean_loss(outputs: Sequence[Output]) -> Tensor:
    """The mean of the losses of batches, a scalar."""
    return torch.stack([_broadcast_loss(output) for output in outputs]).mean()


def _broadcast_loss(output: Output) -> Tensor:
    assert output.loss is not None  # the Engine broadcasts it
    return output.loss


def _first_spoiled(output: Output, context: Context) -> int | None:
    """The first microbatch on any rank whose loss is not finite."""
    spoiled = [microbatch for microbatch, each in output.losses.items() if not bool(each.isfinite())]
    with context.alarm.raised_everywhere():
        [first] = min(all_gather(context.world, [min(spoiled, default=math.inf)]))
    return int(first) if math.isfinite(first) else None
