"""The norm of a whole model's gradient, and clipping to it. What must not live here: optimizers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.agreement import all_gather
from pipeflow.parallel.layout import Place
from pipeflow.parallel.split import splits_of
from pipeflow.runtime.pipeline import Pipeline


def grad_norm(model: Pipeline) -> Tensor:
    """The 2-norm of the whole model's gradient, `model.loss_scale` taken out: a float64 scalar, the same bits on every
    rank of the world. All of them call it together.

    Every weight counts once: one that is split over tensor ranks by its parts, a tied one by the copy on its lowest
    rank, and those that replicas share by the first replica's. Where any gradient of any rank of the world is not
    finite, neither is the norm.

    Raises PipelineError as `execute_pipeline` does.
    """
    layout = model.context.layout
    with model.alarm.raised_everywhere():
        rows = all_gather(model.context.world, _squares(model))
    if not all(math.isfinite(square) for row in rows for square in row):
        return torch.tensor(math.inf, dtype=torch.float64)
    total = 0.0
    for pipeline in range(layout.pipeline):
        places = [Place(0, pipeline, tensor) for tensor in range(layout.tensor)]
        total += rows[layout.rank(places[0])][0] + sum(rows[layout.rank(place)][1] for place in places)
    return torch.tensor(math.sqrt(total) / model.loss_scale, dtype=torch.float64)


def clip_grad_norm_(model: Pipeline, max_norm: float) -> Tensor:
    """Scales the gradients of all ranks so that their global 2-norm is at most `max_norm`, and returns the norm
    before, as `grad_norm` does. Gradients stay multiplied by `model.loss_scale`, which the norm leaves out; a norm
    that is not finite leaves them as they are. All ranks call it together.

    With a MasterWeights optimizer call its own `clip_grad_norm_`, which scales the float32 gradients instead.

    Raises UsageError for a `max_norm` that is not positive, PipelineError as `execute_pipeline` does.
    """
    norm = grad_norm(model)
    factor = clip_factor(norm, max_norm)
    if factor < 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> float:
    """What to multiply gradients of that norm by; 1 where the norm is small enough, or not finite.

    Raises UsageError for a `max_norm` that is not positive.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm must be positive, got {max_norm}")
    if not norm.isfinite():
        return 1.0
    return min(1.0, max_norm / (norm.item() + 1e-6))  # torch adds it too: a pipeline changes no digit


def _squares(model: Pipeline) -> list[float]:
    """Over this rank's gradients, the sum of squares of whole parameters, and that of parts of split ones."""
    split, elsewhere = splits_of(model), model.ties.counted_elsewhere
    sums = list(torch.zeros(2, dtype=torch.float64, device=model.context.device))
    for parameter in model.parameters():
        if parameter.grad is not None and id(parameter) not in elsewhere:
            norm = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float64)
            sums[id(parameter) in split] += norm.square()
    squares: list[float] = torch.stack(sums).tolist()  # one look at the device's memory
    return squares
