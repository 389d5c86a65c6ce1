"""The norm of a whole model's gradient, and clipping to it. What must not live here: optimizers."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.sharding import splits_of
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.runtime.pipeline import Pipeline


def grad_norm(model: Pipeline) -> Tensor:
    """The 2-norm of the whole model's gradient, `model.loss_scale` taken out: a float64 scalar, the same bits on every
    rank of the world. All of them call it together.

    Every weight counts once: one that is split over tensor ranks, or by fully_shard, by its parts, a tied one by the
    copy on its lowest rank, and those that replicas share by the first replica's. Where any gradient of any rank of
    the world is not finite, neither is the norm.

    Raises PipelineError as `execute_pipeline` does.
    """
    layout = model.context.layout
    with model.alarm.raised_everywhere():
        rows = all_gather(model.context.world, _squares(model))
    if not all(math.isfinite(square) for row in rows for square in row):
        return torch.tensor(math.inf, dtype=torch.float64)
    total = 0.0
    for rank, row in enumerate(rows):
        place = layout.place(rank)
        for (over_tensor, over_data), square in zip(_SPREADS, row, strict=True):
            if (over_tensor or place.tensor == 0) and (over_data or place.data == 0):
                total += square
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


# Whether a weight is split over the tensor ranks, and whether over the data ranks, as fully_shard does.
_SPREADS = [(False, False), (False, True), (True, False), (True, True)]


def _squares(model: Pipeline) -> list[float]:
    """The sum of squares of what this rank has of the gradients, for each of _SPREADS."""
    split, elsewhere = splits_of(model), model.ties.counted_elsewhere
    sums = list(torch.zeros(len(_SPREADS), dtype=torch.float64, device=model.context.device))
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None or id(parameter) in elsewhere:
            continue
        over_data = isinstance(gradient, DTensor)
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        norm = torch.linalg.vector_norm(local.detach(), dtype=torch.float64)
        sums[_SPREADS.index((id(parameter) in split, over_data))] += norm.square()
    squares: list[float] = torch.stack(sums).tolist()  # one look at the device's memory
    return squares
