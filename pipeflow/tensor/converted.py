"""Layers into which stock layers are converted in place: the class changes; names, hooks and places in the model stay.
Must not contain: the choice of layers to convert.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from pipeflow.parallel.sharding import Split
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.classifier import VocabParallelClassifier
from pipeflow.tensor.embedding import VocabParallelEmbedding
from pipeflow.tensor.layer import TensorLayer
from pipeflow.tensor.linear import ColumnParallelLinear, RowParallelLinear, SplitLinear
from pipeflow.tensor.matmul import Mode, column_linear, row_linear
from pipeflow.tensor.regions import gather_from_tensor_region, scatter_to_tensor_region, share_in_tensor_region


class AnyColumnLinear(ColumnParallelLinear):
    """A ColumnParallelLinear that takes the whole input or, recognized by its width, a part of it.

    Attributes:
        parts: sizes of the blocks of a packed layer, each of which is split.
        shared: for each block that several ranks share because it has fewer heads than ranks, by its index, how many
            ranks share a head. Each rank computes its part and then gathers the whole head.
    """

    parts: tuple[int, ...]
    shared: Mapping[int, int]

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1] * self.group.size == self.in_features:
            input = gather_from_tensor_region(input, self.group)
        return shared_among(super().forward(input), self.parts, self.shared, self.group)

    def splits(self) -> Mapping[str, Split]:
        if len(self.parts) == 1:
            return super().splits()
        return {name: Split(0, self.out_features, self.parts) for name in super().splits()}


def shared_among(output: Tensor, parts: tuple[int, ...], shared: Mapping[int, int], group: Group) -> Tensor:
    """This rank's part of each block in `parts`; of a block that several ranks share, the head that it shares."""
    if not shared:
        return output
    pieces = list(output.split([part // group.size for part in parts], -1))
    for index, ranks in shared.items():
        pieces[index] = share_in_tensor_region(pieces[index], ranks, group)
    return torch.cat(pieces, -1)


class AnyRowLinear(RowParallelLinear):
    """A RowParallelLinear that takes its part of the input or, recognized by its width, the whole input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_part_of(input, self.in_features, self.group))


class ColumnConv1D(TensorLayer):
    """The Conv1D of GPT-2, a linear layer whose weight is (in, out). Each rank has some of the outputs."""

    weight: nn.Parameter
    bias: nn.Parameter
    nf: int
    in_features: int
    out_features: int
    parts: tuple[int, ...]
    shared: Mapping[int, int]

    def forward(self, x: Tensor) -> Tensor:
        output = column_linear(x, self.weight.t(), self.bias, Mode(self.group, False, None))
        return shared_among(output, self.parts, self.shared, self.group)

    def splits(self) -> Mapping[str, Split]:
        parts = self.parts if len(self.parts) > 1 else ()
        return {"weight": Split(1, self.out_features, parts), "bias": Split(0, self.out_features, parts)}


class RowConv1D(ColumnConv1D):
    """Like ColumnConv1D, but each rank has some of the inputs. The bias is added after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        part = _part_of(x, self.in_features, self.group)
        return row_linear(part, self.weight.t(), self.bias, Mode(self.group, False, None))

    def splits(self) -> Mapping[str, Split]:
        return {"weight": Split(0, self.in_features)}


def _part_of(input: Tensor, features: int, group: Group) -> Tensor:
    return scatter_to_tensor_region(input, group) if input.shape[-1] == features else input


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of the whole linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight: Tensor = module.weight  # type: ignore[assignment]  # that of a Conv1D
    return weight.shape[0], weight.shape[1]


def is_linear(module: nn.Module) -> bool:
    """Returns True if the module computes the same as nn.Linear: it is one, or its class was tried."""
    return isinstance(module, nn.Linear) and _computes_linear(type(module))  # type: ignore[arg-type]  # types are hashable


@lru_cache(maxsize=1024)
def _computes_linear(kind: type[nn.Linear]) -> bool:
    """Tries the forward of a class on random numbers, with a bias and without. The numbers are real even while a plan
    is made with fake tensors.
    """
    if kind.forward is nn.Linear.forward:
        return True
    if kind.__init__ is not nn.Linear.__init__:
        return False  # it may have more parameters than a weight and a bias
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    with _disable_current_modes():
        for bias in (True, False):
            probe = nn.Linear(3, 2, bias=bias, device="meta")
            probe.weight = nn.Parameter(draw(2, 3))
            probe.bias = nn.Parameter(draw(2)) if bias else None  # type: ignore[assignment]  # as without one
            probe.__class__ = kind
            try:
                input = draw(4, 5, 3)
                if not torch.allclose(probe(input), functional.linear(input, probe.weight, probe.bias)):
                    return False
            except Exception:  # it computes something else
                return False
    return True


def is_conv1d(module: nn.Module) -> bool:
    """Returns True if the module is a Conv1D of GPT-2, which several libraries have."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def is_embedding(module: nn.Module) -> bool:
    """Returns True if the module computes the same as nn.Embedding and has no options that a split embedding lacks."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def become_linear(
    module: nn.Module, kind: str, parts: tuple[int, ...], shared: Mapping[int, int], group: Group
) -> TensorLayer:
    """Converts an nn.Linear or a Conv1D to the layer of `kind`. Its parameters must be cut afterwards."""
    if is_conv1d(module):
        inputs, outputs = sizes_of(module)
        made: type[TensorLayer] = RowConv1D if kind == "row" else ColumnConv1D
        options: dict[str, Any] = {"in_features": inputs, "out_features": outputs, "parts": parts, "shared": shared}
        return _become(module, made, group, **options)
    options = {"sequence_parallel": False, "_owns_weight": True}
    kinds: dict[str, type[SplitLinear]] = {"row": AnyRowLinear, "head": VocabParallelClassifier}
    if kind == "row":
        options["input_is_parallel"] = True
    else:
        options["gather_output"] = kind == "head"
    if kind not in kinds:
        options |= {"parts": parts, "shared": shared}
    return _become(module, kinds.get(kind, AnyColumnLinear), group, **options)


def become_embedding(module: nn.Module, group: Group) -> TensorLayer:
    """Converts an nn.Embedding to one of which each rank has some of the rows. Its parameter must be cut afterwards."""
    return _become(module, VocabParallelEmbedding, group, sequence_parallel=False)


def _become(module: nn.Module, kind: type[TensorLayer], group: Group, **attributes: Any) -> TensorLayer:
    module.__class__ = kind
    vars(module).update(attributes)
    assert isinstance(module, kind)
    module.join(group)
    return module
