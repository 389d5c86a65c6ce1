"""Gradient clipping by the norm of a whole model's gradient. Must not contain: optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import entries_of
from pipeflow.engine.parallel.transport.agreement import all_gather_tensor
from pipeflow.engine.runtime.confirmation import scale_gradients
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.torch_private.tensors import foreach_norm


def grad_norm(model: Pipeline, norm_type: float = 2.0) -> Tensor:
    """Returns the norm of the whole model's gradient, seen as one vector and divided by `model.loss_scale`: a float64
    scalar on this rank's device, bit-identical on every rank of the world. All ranks call it together. On a GPU the
    host does not wait for it.

    Every weight counts once. Of a weight that is split over ranks, all parts count. Of a tied weight, one copy counts.
    Of the replicas, the first one counts. A complex entry counts by its magnitude. If a gradient on any rank is not
    finite, neither is the norm: it is NaN if one is NaN, and infinite otherwise.

    Args:
        model: the pipeline whose gradients to measure.
        norm_type: order of the norm, such as 1, 2, or math.inf for the largest magnitude.

    Raises UsageError if `model` is no Pipeline or `norm_type` is not positive, and PipelineError as `execute_pipeline`
    does.
    """
    _require_pipeline(model, "grad_norm(model)")
    return _grad_norm(model, norm_type, {})


def _grad_norm(model: Pipeline, norm_type: float, factors: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """Like `grad_norm`, with gradients multiplied by `factors`."""

    def gather() -> tuple[Tensor, object]:
        if not norm_type > 0:
            raise UsageError(f"norm_type must be positive, such as 2.0 or math.inf, got {norm_type}")
        norms = all_gather_tensor(model.context.world, norms_of(model, norm_type, factors))
        return norms, norms.tolist() if model.context.elastic else None

    def told(norms: list[list[float]]) -> Tensor:
        return torch.tensor(norms, dtype=torch.float64, device=model.context.device)

    return whole_norm(model.alarm.run("", gather, told), norm_type) / model.loss_scale


def clip_grad_norm_(model: Pipeline, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales the gradients of all ranks so that their global norm is at most `max_norm`. Returns the norm before
    scaling, as `grad_norm` does. All ranks call it together.

    It works with any optimizer. With MasterWeights, the next step scales the float32 gradients instead, so 16-bit
    gradients lose no precision; a second clipping before that step takes the first into account. `model.loss_scale`
    stays in the gradients, but not in the norm. If the norm is not finite, gradients stay as they are.

    Args:
        model: the pipeline whose gradients to clip.
        max_norm: maximum norm of the whole gradient.
        norm_type: order of the norm, as in `grad_norm`.

    Raises UsageError if `model` is no Pipeline, or `max_norm` or `norm_type` is not positive, and PipelineError as
    `execute_pipeline` does.
    """
    _require_pipeline(model, f"clip_grad_norm_(model, {max_norm})")
    waiting = {parameter for clipping in model.clippings for parameter in clipping.parameters}
    pending: dict[nn.Parameter, Tensor] = {}
    for clipping in model.clippings:
        if clipping.pending is not None:
            pending |= dict.fromkeys(clipping.parameters, clipping.pending)
    norm = _grad_norm(model, norm_type, pending)
    factor = clip_factor(norm, max_norm)
    for clipping in model.clippings:
        clipping.add(norm, factor)
    if factor.device.type == "cpu" and factor == 1:  # elsewhere the host would wait to know
        return norm
    scale_gradients([p.grad for p in model.parameters() if p.grad is not None and p not in waiting], factor)
    return norm


def _require_pipeline(model: object, call: str) -> None:
    if not isinstance(model, Pipeline):
        raise UsageError(
            f"the norm is that of the whole model's gradient, of which a rank's parameters are a part: pass the "
            f"Pipeline, {call}, not {type(model).__name__}"
        )


def require_checks(clip_grad_norm: float, non_finite: str) -> None:
    """Raises UsageError unless these say how the gradients of a step are checked."""
    if not clip_grad_norm >= 0:
        raise UsageError(f"clip_grad_norm must be positive, or 0 for no clipping, got {clip_grad_norm}")
    if non_finite not in ("stop", "skip", "ignore"):
        raise UsageError(f"non_finite must be 'stop', 'skip' or 'ignore', got {non_finite!r}")


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that scales gradients with `norm` to `max_norm`; 1 if the norm is small enough, or not finite."""
    if not max_norm > 0:
        raise UsageError(f"max_norm must be positive, got {max_norm}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch adds it too, so results agree in every digit
    return torch.where(norm.isfinite(), factor, 1.0)


def norms_of(model: Pipeline, norm_type: float, factors: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """Norms of two groups of this rank's gradients: those that this rank counts, and those that another rank counts.
    Shape [2], float64.
    """
    counted, found = model.gradients.counted(), dict[nn.Parameter, Tensor]()
    held = {p: entries_of(p.grad, p) for p in model.parameters() if p.grad is not None}
    for dtype in (torch.float64, torch.complex128):
        alike = {p: each for p, each in held.items() if each.numel() and each.is_complex() is dtype.is_complex}
        if alike:
            found |= zip(alike, foreach_norm([*alike.values()], norm_type, dtype), strict=True)
    none, owners = torch.zeros((), dtype=torch.float64, device=model.context.device), model.gradients.owners
    if owners.of:  # each norm is known to the owner alone
        for group in dict.fromkeys((owners.group, owners.expert_group)):
            its = {p: of for p, of in owners.of.items() if owners.group_of(p) is group}
            row = torch.stack([none, *(found.get(p, none) if of == group.rank else none for p, of in its.items())])
            group.all_reduce(row).wait()
            found |= zip(its, row[1:], strict=True)
    norms: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in filter(found.__contains__, model.parameters()):
        norm = found[parameter]
        norms[parameter not in counted].append(norm * factors[parameter] if parameter in factors else norm)
    return torch.stack([combined(torch.stack([none, *each]), norm_type) for each in norms])


def whole_norm(norms: Tensor, norm_type: float) -> Tensor:
    """The norm of a whole model's gradient, given those that `norms_of` returns on every rank, [ranks, 2]."""
    return torch.where(norms.isfinite().all(), combined(norms[:, 0], norm_type), norms.max())


def combined(norms: Tensor, norm_type: float) -> Tensor:
    """The norm of a vector whose parts have these norms. They are scaled by the largest, since powers may overflow."""
    largest = norms.max()
    scaled = torch.linalg.vector_norm(norms / largest, norm_type)
    return torch.where((largest > 0) & largest.isfinite(), largest * scaled, largest)
