"""The norm of a whole model's gradient, and clipping to it. What must not live here: optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.parallel.sharding import entries_of, is_first_holder, splits_of
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.runtime.pipeline import Pipeline


def grad_norm(model: Pipeline, norm_type: float = 2.0) -> Tensor:
    """The norm of the whole model's gradient as one vector, `model.loss_scale` taken out: a float64 scalar, the same
    bits on every rank of the world. All of them call it together.

    Every weight counts once: one that is split over tensor ranks, by fully_shard or as torch's DTensor, by its parts,
    a tied one by the copy on its lowest rank, and those that replicas share by the first replica's. A complex entry
    counts by its magnitude. Where any gradient of any rank of the world is not finite, neither is the norm.

    Args:
        norm_type: the norm's order, such as 1, 2 or math.inf for the largest magnitude.

    Raises UsageError for a `norm_type` that is not positive, PipelineError as `execute_pipeline` does.
    """
    return _grad_norm(model, norm_type, {})


def _grad_norm(model: Pipeline, norm_type: float, factors: Mapping[nn.Parameter, float]) -> Tensor:
    """As `grad_norm`, of gradients multiplied by `factors`."""
    with model.alarm.raised_everywhere():
        if not norm_type > 0:
            raise UsageError(f"norm_type must be positive, such as 2.0 or math.inf, got {norm_type}")
        rows = all_gather(model.context.world, _norms(model, norm_type, factors))
    if not all(math.isfinite(norm) for row in rows for norm in row):
        return torch.tensor(math.inf, dtype=torch.float64)
    counted = torch.tensor([counted for counted, _ in rows], dtype=torch.float64)
    return _combined(counted, norm_type) / model.loss_scale


def clip_grad_norm_(model: Pipeline, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales the gradients of all ranks so that their global norm is at most `max_norm`, and returns the norm before,
    as `grad_norm` does. All ranks call it together, whatever steps the model: where that is a MasterWeights, its next
    step scales the float32 gradients instead, so that those in 16 bits lose nothing; what is clipped again before that
    step counts as scaled already.

    Gradients stay multiplied by `model.loss_scale`, which the norm leaves out; a norm that is not finite leaves them
    as they are.

    Raises UsageError for a `max_norm` or `norm_type` that is not positive, PipelineError as `execute_pipeline` does.
    """
    pending: dict[nn.Parameter, float] = {}
    for clipping in model.clippings:
        pending |= dict.fromkeys(clipping.parameters, clipping.pending)
    norm = _grad_norm(model, norm_type, pending)
    factor = _clip_factor(norm, max_norm)
    for clipping in model.clippings:
        clipping.add(norm, factor)
    if factor < 1:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter not in pending:
                parameter.grad.mul_(factor)
    return norm


def _clip_factor(norm: Tensor, max_norm: float) -> float:
    """What to multiply gradients of that norm by; 1 where the norm is small enough, or not finite."""
    if not max_norm > 0:
        raise UsageError(f"max_norm must be positive, got {max_norm}")
    if not norm.isfinite():
        return 1.0
    return min(1.0, max_norm / (norm.item() + 1e-6))  # torch adds it too: a pipeline changes no digit


def _norms(model: Pipeline, norm_type: float, factors: Mapping[nn.Parameter, float]) -> list[float]:
    """The norm of what of this rank's gradients counts, and that of the rest, which another rank counts."""
    layout, rank = model.context.layout, model.context.rank
    split, elsewhere = splits_of(model), model.gradients.counted_elsewhere
    norms: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None and (local := entries_of(gradient, parameter)).numel():
            key = id(parameter)
            first = key not in elsewhere and is_first_holder(parameter, layout, rank, is_split=key in split)
            dtype = torch.complex128 if local.is_complex() else torch.float64
            norm = torch.linalg.vector_norm(local, norm_type, dtype=dtype)
            norms[not first].append(norm * factors.get(parameter, 1.0))
    device = model.context.device
    both: list[float] = torch.stack([_combined(_stacked(each, device), norm_type) for each in norms]).tolist()
    return both  # by one look at the device's memory


def _stacked(norms: Iterable[Tensor], device: torch.device) -> Tensor:
    return torch.stack([torch.zeros((), dtype=torch.float64, device=device), *norms])


def _combined(norms: Tensor, norm_type: float) -> Tensor:
    """The norm of a vector whose parts have these, scaled by the largest, whose powers could overflow."""
    largest = norms.max()
    scaled = torch.linalg.vector_norm(norms / largest, norm_type)
    return torch.where(largest > 0, largest * scaled, largest)
