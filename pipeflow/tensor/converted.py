"""Layers that a stock layer becomes where it stands: its class is changed; names, hooks and its places in
the model stay. What must not live here: which layer becomes what.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from pipeflow.parallel.sharding import Split
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.classifier import VocabParallelClassifier
from pipeflow.tensor.embedding import VocabParallelEmbedding
from pipeflow.tensor.layer import TensorLayer
from pipeflow.tensor.linear import ColumnParallelLinear, RowParallelLinear, SplitLinear
from pipeflow.tensor.matmul import Mode, column_linear, row_linear
from pipeflow.tensor.regions import scatter_to_tensor_region


class PackedColumnLinear(ColumnParallelLinear):
    """A ColumnParallelLinear that computes several things in one, of each of which a rank has its part.

    Attributes:
        parts: the sizes of these in the whole layer.
    """

    parts: tuple[int, ...]

    def splits(self) -> Mapping[str, Split]:
        return {name: Split(0, self.out_features, self.parts) for name in super().splits()}


class AnyRowLinear(RowParallelLinear):
    """A RowParallelLinear that takes its part of the input or, by its width, the whole."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_part_of(input, self.in_features, self.group))


class ColumnConv1D(TensorLayer):
    """The Conv1D of GPT-2, a linear layer whose weight is (in, out), of which each rank has some of the outputs."""

    weight: nn.Parameter
    bias: nn.Parameter
    nf: int
    in_features: int
    out_features: int
    parts: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight.t(), self.bias, Mode(self.group, False, None))

    def splits(self) -> Mapping[str, Split]:
        parts = self.parts if len(self.parts) > 1 else ()
        return {"weight": Split(1, self.out_features, parts), "bias": Split(0, self.out_features, parts)}


class RowConv1D(ColumnConv1D):
    """As ColumnConv1D, of which each rank has some of the inputs. The whole bias is added after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        part = _part_of(x, self.in_features, self.group)
        return row_linear(part, self.weight.t(), self.bias, Mode(self.group, False, None))

    def splits(self) -> Mapping[str, Split]:
        return {"weight": Split(0, self.in_features)}


def _part_of(input: Tensor, features: int, group: Group) -> Tensor:
    return scatter_to_tensor_region(input, group) if input.shape[-1] == features else input


class Told(nn.Module):
    """A module that computes as its class does, and tells how its own parameters lie over the ranks."""

    _told_splits: dict[str, Split]
    _told_partial: tuple[str, ...]

    def splits(self) -> Mapping[str, Split]:
        return self._told_splits

    def partial_gradients(self) -> Collection[str]:
        return self._told_partial


@lru_cache(maxsize=1024)
def _told(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (Told, kind), {"__module__": kind.__module__})


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """How many inputs and outputs the whole of a linear layer has."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight: Tensor = module.weight  # type: ignore[assignment]  # that of a Conv1D
    return weight.shape[0], weight.shape[1]


def is_linear(module: nn.Module) -> bool:
    """Whether it computes as nn.Linear does."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is a Conv1D of GPT-2, which several libraries have."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def is_embedding(module: nn.Module) -> bool:
    """Whether it computes as nn.Embedding does, and has no options that a part of an embedding cannot keep."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def become_linear(module: nn.Module, kind: str, parts: tuple[int, ...], group: Group) -> TensorLayer:
    """Makes an nn.Linear or a Conv1D that of `kind`, without its parameters, which are to be cut."""
    if is_conv1d(module):
        inputs, outputs = sizes_of(module)
        made: type[TensorLayer] = RowConv1D if kind == "row" else ColumnConv1D
        return _become(module, made, group, in_features=inputs, out_features=outputs, parts=parts)
    options: dict[str, Any] = {"sequence_parallel": False, "_owns_weight": True}
    kinds: dict[str, type[SplitLinear]] = {"row": AnyRowLinear, "head": VocabParallelClassifier}
    if kind == "row":
        options["input_is_parallel"] = True
    else:
        options["gather_output"] = kind == "head"
    if kind == "column" and len(parts) > 1:
        return _become(module, PackedColumnLinear, group, parts=parts, **options)
    return _become(module, kinds.get(kind, ColumnParallelLinear), group, **options)


def become_embedding(module: nn.Module, group: Group) -> TensorLayer:
    """Makes an nn.Embedding one of which each rank has some of the rows; without its parameter, which is to be cut."""
    return _become(module, VocabParallelEmbedding, group, sequence_parallel=False)


def become_told(module: nn.Module, splits: Mapping[str, Split], partial: Collection[str]) -> None:
    """Has a module tell more of its own parameters: which are split, and which have gradients that are parts."""
    if not isinstance(module, Told):
        module.__class__ = _told(type(module))  # type: ignore[arg-type]  # types are hashable
        vars(module).update(_told_splits={}, _told_partial=())
    vars(module).update(
        _told_splits={**vars(module)["_told_splits"], **splits},
        _told_partial=(*vars(module)["_told_partial"], *partial),
    )


def _become(module: nn.Module, kind: type[TensorLayer], group: Group, **attributes: Any) -> TensorLayer:
    module.__class__ = kind
    vars(module).update(attributes)
    assert isinstance(module, kind)
    module.join(group)
    return module
