"""Products, embeddings and reshapes of split ColoTensors, as in Megatron-LM (Shoeybi et al., arXiv 1909.08053, section
3). Each returns NotImplemented if it cannot compute with parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.colossalai.tensor.lying import part_of, whole_of
from pipeflow.colossalai.tensor.specs import ColoTensorSpec, ShardSpec
from pipeflow.colossalai.tensor.tensors import ColoTensor
from pipeflow.tensor.matmul import Mode, column_linear, row_linear
from pipeflow.tensor.regions import reduce_from_tensor_region


def is_split(value: object) -> TypeGuard[ColoTensor]:
    """True for a ColoTensor of which this rank has only a part."""
    return isinstance(value, ColoTensor) and not value.is_replicate()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """functional.linear: the weight is (out, in)."""
    return _product(input, weight, bias, {0: "out", 1: "in"})


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """torch.addmm, as a Conv1D calls it: the weight is (in, out)."""
    return NotImplemented if (beta, alpha) != (1, 1) else _product(mat1, mat2, input, {0: "in", 1: "out"})


def _product(input: Tensor, weight: Tensor, bias: Tensor | None, meaning: dict[int, str]) -> Any:
    if not is_split(weight):
        return NotImplemented
    mode = Mode(weight.process_group.tensor, False, None)
    dim = weight.split_dim % 2
    matrix = plain(weight) if meaning[0] == "out" else plain(weight).t()
    if meaning[dim] == "in":
        return row_linear(_part(input, -1, weight), matrix, whole(bias), mode)
    output = column_linear(whole(input), matrix, None if bias is None else _part(bias, 0, weight), mode)
    return _as_asked(output, weight)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """functional.embedding: the weight is (entries, hidden)."""
    if not is_split(weight) or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    group, rows = weight.process_group.tensor, weight.shape[0]
    if weight.split_dim % 2 == 1:
        return _as_asked(functional.embedding(input, plain(weight), padding_idx), weight)
    local = input - group.rank * rows
    elsewhere = (local < 0) | (local >= rows)
    if padding_idx is not None:
        padding_idx = padding_idx % (rows * group.size) - group.rank * rows
        padding_idx = padding_idx if 0 <= padding_idx < rows else None
    part = functional.embedding(local.masked_fill(elsewhere, 0), plain(weight), padding_idx)
    return reduce_from_tensor_region(part.masked_fill(elsewhere.unsqueeze(-1), 0), group)


def _reshape(input: Tensor, *shape: Any) -> Any:
    """Tensor.view and reshape: the whole's size as last dimension is replaced by the part's."""
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size) else shape)
    if not isinstance(input, ColoTensor) or isinstance(input, nn.Parameter) or not sizes:
        return NotImplemented
    if sizes[-1] not in (input.shape[-1], input.size_global()[-1]):
        return NotImplemented
    return as_part(plain(input).reshape(*sizes[:-1], input.shape[-1]), input.spec)


def _as_asked(output: Tensor, weight: ColoTensor) -> Tensor:
    """A layer's output, split along the last dimension; it is gathered unless the weight's spec says otherwise."""
    spec = ColoTensorSpec(weight.process_group, ShardSpec([-1], [weight.process_group.tp_world_size()]))
    if weight.compute_spec is None or weight.compute_spec.output_replicate:
        return whole_of(output, spec)
    return as_part(output, spec)


def as_part(output: Tensor, spec: ColoTensorSpec) -> Tensor:
    """This rank's output as the part of a ColoTensor with this spec."""
    return ColoTensor.from_torch_tensor(output, spec)


def _part(value: Tensor, dim: int, weight: ColoTensor) -> Tensor:
    """This rank's part of an operand, which may be whole."""
    if is_split(value):
        own: Tensor = plain(value)
        return own
    shares = ShardSpec([dim], [weight.process_group.tp_world_size()])
    return part_of(plain(value), ColoTensorSpec(weight.process_group, shares))


def whole(value: Any) -> Any:
    """The whole of a ColoTensor as a plain tensor; other values unchanged."""
    return whole_of(plain(value), value.spec) if isinstance(value, ColoTensor) else value


def plain(value: Any) -> Any:
    """The same memory as a plain torch tensor, in the same graph."""
    return value.as_subclass(Tensor) if isinstance(value, ColoTensor) else value


OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    functional.embedding: _embedding,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
}
