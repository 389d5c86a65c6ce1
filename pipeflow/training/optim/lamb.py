"""Lamb: Adam's update, scaled per weight by the weight's norm (You et al., 2020, arXiv:1904.00962, algorithm 2)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import context_if_launched, current_context
from pipeflow.engine.parallel.sharding import Split, local_part, settled
from pipeflow.engine.tensor.stepping import Stepping, stepping_of, watch
from pipeflow.engine.torch_private.tensors import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    foreach_reciprocal_,
    foreach_sqrt,
    foreach_sub_,
)
from pipeflow.training.optim.optimizer import require_parameters_of


class Lamb(Optimizer):
    """The Lamb optimizer. With moving averages m of the gradient and v of its square, it subtracts
    `lr * |p| / |u| * u` from a weight p, where `u = m / (sqrt(v) + eps) + weight_decay * p`; if either norm is 0, it
    subtracts `lr * u`.

    `|p|` and `|u|` are norms of the whole weight, also if fully_shard, torch's DTensor or tensor ranks hold it in
    parts; one exchange per step computes them for all weights. With several tensor ranks, Lamb must know which weights
    are split: it knows those of Pipelines and of modules that `pipeflow.tensor.shard` has split; for others pass
    `model`.

    Args:
        params: parameters or parameter groups, as for torch's optimizers.
        lr: learning rate. This and the next five are options of a group.
        betas: decay rates of the moving averages m and v.
        eps: added to the square root of v.
        weight_decay: factor of the weight p in u.
        adam: subtract lr * u instead, such as for biases and norms.
        bias_correction: divide m by 1 - betas[0] ** t and v by 1 - betas[1] ** t in step t, as in the paper. The
            default is without, as in ColossalAI.
        model: the module that has the parameters.

    Raises UsageError for options out of range and for parameters that `model` lacks. `step` raises UsageError for
    sparse gradients, and if there are several tensor ranks and Lamb does not know the model.
    """

    steps_parts = True  # as it steps them within whole weights

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        bias_correction: bool = False,
        *,
        model: nn.Module | None = None,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise UsageError(f"{name} must be at least 0, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"betas must be two numbers from 0 to below 1, such as (0.9, 0.999), got {betas}")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "adam": adam, "bias_correction": bias_correction})
        if model is not None:
            require_parameters_of(model, self)
            watch(model)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # None, as torch's
        """Steps all parameters that have a gradient. All ranks that hold parts of the same weights call it together.
        With several tensor ranks, raises PipelineError as `execute_pipeline` does.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepping = stepping_of(self)
        with self._on_all_ranks(stepping):
            self._step(stepping.splits)
        return loss

    def _on_all_ranks(self, stepping: Stepping) -> AbstractContextManager[None]:
        context = context_if_launched()
        if context is None or context.tensor_size == 1:
            return nullcontext()
        if not stepping.is_known:
            raise UsageError(
                "Lamb needs the norms of whole weights, but tensor ranks hold parts of them: pass the module that has "
                "them, as in Lamb(model.parameters(), ..., model=model)"
            )
        return context.alarm.raised_everywhere()

    def _step(self, splits: Mapping[int, Split]) -> None:
        parts = []
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError("Lamb does not support sparse gradients: make the embedding with sparse=False")
        for group in self.param_groups:
            wholes = []
            for parameter in group["params"]:
                split = splits.get(id(parameter))
                if split is not None or isinstance(parameter, DTensor):
                    parts.append((parameter, group, split))
                elif parameter.grad is not None:
                    wholes.append(parameter)
            for batch in _batches(wholes):
                self._step_wholes(batch, group)
        if parts:
            self._step_parts(parts)

    def _step_wholes(self, parameters: list[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Steps parameters that this rank holds whole."""
        weights, changes = [_entries(parameter) for parameter in parameters], self._changes(parameters, group)
        trusts = None
        if not group["adam"]:
            trusts = [_trust(*norms) for norms in zip(_norms(weights), _norms(changes), strict=True)]
        _apply(weights, changes, trusts, group["lr"])

    def _step_parts(self, parts: Sequence[tuple[nn.Parameter, Mapping[str, Any], Split | None]]) -> None:
        """Steps parameters that other ranks hold parts of: computes all updates, sums their squared norms in one
        exchange, then steps.
        """
        changes = [
            None if parameter.grad is None else self._changes([parameter], group)[0] for parameter, group, _ in parts
        ]
        device = _entries(parts[0][0]).device
        squares = torch.stack(
            [
                _squares(parameter, change, split).to(device)
                for (parameter, _, split), change in zip(parts, changes, strict=True)
            ]
        )
        _sum_over_meshes(squares, [parameter for parameter, _, _ in parts])
        if rows := [row for row, (_, _, split) in enumerate(parts) if split is not None]:
            of_parts = squares[rows]
            current_context().tensor.all_reduce(of_parts).wait()
            squares[rows] = of_parts
        for (parameter, group, _), change, trust in zip(parts, changes, _trust(*squares.sqrt().unbind(1)), strict=True):
            if change is not None:
                trusts = None if group["adam"] else [trust.to(change.device)]
                _apply([_entries(parameter)], [change], trusts, group["lr"])

    def _changes(self, parameters: Sequence[nn.Parameter], group: Mapping[str, Any]) -> list[Tensor]:
        """The update u of each parameter, for the entries on this rank."""
        states = [self._state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        means, squares = ([_entries(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        gradients = [
            _entries(settled(parameter.grad, parameter)).to(mean.dtype)
            for parameter, mean in zip(parameters, means, strict=True)
            if parameter.grad is not None
        ]
        first, second = group["betas"]
        foreach_add_(steps, 1)
        foreach_lerp_(means, gradients, 1 - first)
        foreach_mul_(squares, second)
        foreach_addcmul_(squares, gradients, gradients, 1 - second)
        roots = foreach_sqrt(squares)
        if group["bias_correction"]:
            foreach_div_(roots, [math.sqrt(1 - second ** step.item()) for step in steps])
        foreach_add_(roots, group["eps"])
        foreach_reciprocal_(roots)  # in place: allocating memory costs more than a division
        changes = roots
        foreach_mul_(changes, means)
        if group["bias_correction"]:
            foreach_div_(changes, [1 - first ** step.item() for step in steps])
        if group["weight_decay"]:
            foreach_add_(changes, [_entries(p) for p in parameters], alpha=group["weight_decay"])
        return list(changes)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


_AT_ONCE = {"cpu": 2**16}
"""Number of elements stepped together: on a CPU as many as fit its cache, elsewhere enough to keep the device busy."""


def _batches(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Lists of parameters to step together, in their order."""
    batch: list[nn.Parameter] = []
    numbers = 0
    for parameter in parameters:
        if batch and numbers + parameter.numel() > _AT_ONCE.get(parameter.device.type, 2**26):
            yield batch
            batch, numbers = [], 0
        batch.append(parameter)
        numbers += parameter.numel()
    if batch:
        yield batch


def _apply(weights: list[Tensor], changes: list[Tensor], trusts: list[Tensor] | None, lr: float | Tensor) -> None:
    """Subtracts the scaled `changes` from `weights`; `changes` are overwritten."""
    if trusts is None:
        foreach_mul_(changes, lr)
    else:
        foreach_mul_(changes, [trust * lr for trust in trusts])
    foreach_sub_(weights, changes)


_ROW = 4096  # elements: a float32 sum of so many squares has a relative error of about 2e-6


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norms of the tensors, in float64. On a CPU, where float64 is slow, float32 tensors are summed by rows."""
    rows = [_norm_by_rows(tensor) if tensor.is_cpu and tensor.dtype == torch.float32 else None for tensor in tensors]
    if all(norm is not None for norm in rows):
        return [norm for norm in rows if norm is not None]
    return list(foreach_norm(list(tensors), 2, torch.float64))


def _norm_by_rows(tensor: Tensor) -> Tensor | None:
    """The 2-norm, summed by rows; None if that is no faster, or if float32 squares may overflow or underflow."""
    if tensor.numel() < _ROW or not tensor.is_contiguous():
        return None
    flat = tensor.view(-1)
    end = flat.numel() - flat.numel() % _ROW
    rows = torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1)
    norm = torch.linalg.vector_norm(torch.cat([rows, flat[end:]]), dtype=torch.float64)
    return norm if 1e-12 < norm < 1e12 else None


def _trust(norm: Tensor, change: Tensor) -> Tensor:
    """The norm of a weight divided by the norm of its u; 1 if either is 0."""
    return torch.where((norm > 0) & (change > 0), norm / change, 1.0)


def _squares(parameter: nn.Parameter, change: Tensor | None, split: Split | None) -> Tensor:
    """Squared norms of this rank's parts of the weight and of its u, without padding; zeros without a gradient."""
    weight = _entries(parameter)
    if change is None:
        return torch.zeros(2, dtype=torch.float64, device=weight.device)
    both = [weight, change]
    if split is not None and not isinstance(parameter, DTensor):  # pipeflow's own layers pad those with zeros
        both = [split.unpadded(each, current_context().tensor_rank) for each in both]
    return torch.stack(_norms(both)).square_()


def _sum_over_meshes(squares: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Replaces the squares of each DTensor's part by the sum over its parts; DTensors laid out alike share a sum."""
    alike: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[int]] = defaultdict(list)
    for row, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            alike[parameter.device_mesh, parameter.placements].append(row)
    for (mesh, placements), rows in alike.items():
        parts = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
        squares[rows] = DTensor.from_local(squares[rows], mesh, parts, run_check=False).full_tensor()


def _entries(tensor: Tensor) -> Tensor:
    """This rank's entries as a real-valued view."""
    local = local_part(tensor)
    return torch.view_as_real(local) if local.is_complex() else local
