"""Lamb: Adam's update, scaled per weight to that weight's norm (You et al., 2020, arXiv:1904.00962, algorithm 2)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.optim.optimizer import require_parameters_of
from pipeflow.parallel.context import context_if_launched, current_context
from pipeflow.parallel.sharding import Split, local_part, settled, splits_of


class Lamb(Optimizer):
    """With m and v the moving averages of the gradient and of its square, a weight p is stepped by
    lr * |p| / |u| * u, where u = m / (sqrt(v) + eps) + weight_decay * p; by lr * u where either norm is 0.

    The norms are those of the whole weight, also where fully_shard, torch's DTensor or tensor ranks hold it in parts:
    one exchange for all weights of a step. Which weights tensor ranks hold in parts is said by `model`; a `Zero` or
    `MasterWeights` around this optimizer says it, too. Without tensor ranks nothing needs to be said.

    Args:
        params: parameters or groups, as for torch's optimizers.
        lr, betas, eps, weight_decay: options of a group.
        adam: steps by lr * u. An option of a group, such as the biases and norms.
        bias_correction: divides m by 1 - betas[0] ** t and v by 1 - betas[1] ** t in step t, as the paper does.
            ColossalAI leaves it out, so that is the default. An option of a group.
        model: the module that has the parameters, or a Pipeline of it.

    Raises UsageError for options out of range, and for a parameter that `model` does not have; in a step for sparse
    gradients, and where there are tensor ranks and nobody said which weights they hold in parts.
    """

    _model: nn.Module | None = None
    _stepped: Mapping[nn.Parameter, nn.Parameter] = {}

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
            self.lies_in(model, {})

    def lies_in(self, model: nn.Module, stepped: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Says whose parameters are stepped, and what is `stepped` in place of each, as a master is; itself where that
        has no entry.
        """
        self._model, self._stepped = model, stepped

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # None, as torch's
        """Steps all parameters that have a gradient. All ranks that hold parts of the same weights step together.
        Raises PipelineError as `execute_pipeline` does, where there are tensor ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._on_all_ranks():
            self._step()
        return loss

    def _on_all_ranks(self) -> AbstractContextManager[None]:
        context = context_if_launched()
        if context is None or context.tensor_size == 1:
            return nullcontext()
        if self._model is None:
            raise UsageError(
                "Lamb looks at whole weights, and tensor ranks hold parts of them: say of which module these are the "
                "parameters, Lamb(model.parameters(), ..., model=model)"
            )
        return context.alarm.raised_everywhere()

    def _step(self) -> None:
        splits = self._splits()
        updates = [
            _Update(parameter, group, self._change(parameter, group), splits.get(id(parameter)))
            for group in self.param_groups
            for parameter in group["params"]
        ]
        if updates:
            for update, trust in zip(updates, _trusts(updates), strict=True):
                update.apply(trust)

    def _splits(self) -> dict[int, Split]:
        """What is stepped and lies in parts on the tensor ranks, by its id."""
        if self._model is None or context_if_launched() is None:
            return {}
        splits = splits_of(self._model)
        return {id(self._stepped.get(p, p)): splits[id(p)] for p in self._model.parameters() if id(p) in splits}

    def _change(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor | None:
        """What the paper scales, u: of the entries that are here. None where there is no gradient."""
        if parameter.grad is None:
            return None
        if parameter.grad.is_sparse:
            raise UsageError("Lamb needs whole gradients, got a sparse one: make the embedding with sparse=False")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        mean, square = _entries(state["exp_avg"]), _entries(state["exp_avg_sq"])
        gradient = _entries(settled(parameter.grad, parameter)).to(mean.dtype)
        first, second = group["betas"]
        steps = state["step"].item() if group["bias_correction"] else math.inf  # then there is nothing to correct
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (square / (1 - second**steps)).sqrt_().add_(group["eps"])
        change: Tensor = (mean / (1 - first**steps)).div_(root)
        return change.add_(_entries(parameter), alpha=group["weight_decay"])


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """Of one parameter: the options of its group, the u that is to be scaled, and how tensor ranks split it."""

    parameter: nn.Parameter
    group: Mapping[str, Any]
    change: Tensor | None
    split: Split | None

    def squares(self) -> Tensor:
        """Those of the norms of what is here of the weight and of u; zeros where there is no gradient."""
        weight = _entries(self.parameter)
        if self.change is None:
            return torch.zeros(2, dtype=torch.float64, device=weight.device)
        norms = [torch.linalg.vector_norm(self._real(each), dtype=torch.float64) for each in (weight, self.change)]
        return torch.stack(norms).square_()

    def _real(self, entries: Tensor) -> Tensor:
        """Without what pads this rank's part; our own layers pad with zeros, so DTensors of theirs need no look."""
        if self.split is None or isinstance(self.parameter, DTensor):
            return entries
        return self.split.unpadded(entries, current_context().tensor_rank)

    def apply(self, trust: Tensor) -> None:
        if self.change is not None:
            scale = 1.0 if self.group["adam"] else trust.to(self.change.device)
            _entries(self.parameter).sub_(self.change.mul_(scale * self.group["lr"]))


def _trusts(updates: Sequence[_Update]) -> Tensor:
    """Per update the norm of the whole weight over that of the whole u, 1 where either is 0."""
    device = _entries(updates[0].parameter).device
    squares = torch.stack([update.squares().to(device) for update in updates])
    _sum_over_meshes(squares, [update.parameter for update in updates])
    _sum_over_tensor_ranks(squares, [row for row, update in enumerate(updates) if update.split is not None])
    norms, changes = squares.sqrt().unbind(1)
    return torch.where((norms > 0) & (changes > 0), norms / changes, 1.0)


def _sum_over_meshes(squares: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Puts the sum over the parts of a DTensor in place of that part's, for all that lie alike at once."""
    alike: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[int]] = defaultdict(list)
    for row, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            alike[parameter.device_mesh, parameter.placements].append(row)
    for (mesh, placements), rows in alike.items():
        parts = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
        squares[rows] = DTensor.from_local(squares[rows], mesh, parts, run_check=False).full_tensor()


def _sum_over_tensor_ranks(squares: Tensor, rows: list[int]) -> None:
    if rows:
        parts = squares[rows]
        current_context().tensor.all_reduce(parts).wait()
        squares[rows] = parts


def _entries(tensor: Tensor) -> Tensor:
    """What this rank holds of it, as real numbers, in the memory where it lies."""
    local = local_part(tensor)
    return torch.view_as_real(local) if local.is_complex() else local
