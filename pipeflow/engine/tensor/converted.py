"""Classes that stock layers and modules get in place when they are split: names, hooks and places in the model stay.
Some keep the forward of their class, and in addition know how their own parameters are split, or take split arguments
or sum their output. Must not contain: the choice of layers to convert.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import Split
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.embedding import VocabParallelEmbedding
from pipeflow.engine.tensor.layer import Membership, TensorLayer
from pipeflow.engine.tensor.linear import (
    ColumnParallelLinear,
    Mode,
    RowParallelLinear,
    VocabParallelClassifier,
    column_linear,
    row_linear,
)
from pipeflow.engine.tensor.regions import (
    copy_to_tensor_region,
    gather_from_tensor_region,
    reduce_from_tensor_region,
    scatter_to_tensor_region,
    share_in_tensor_region,
)
from pipeflow.engine.torch_private.modes import disable_current_modes
from pipeflow.engine.torch_private.trees import tree_map


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
    with disable_current_modes():
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
) -> None:
    """Converts an nn.Linear or a Conv1D to the layer of `kind`. Its parameters must be cut afterwards."""
    if is_conv1d(module):
        inputs, outputs = sizes_of(module)
        options: dict[str, Any] = {"in_features": inputs, "out_features": outputs, "parts": parts, "shared": shared}
        _become(module, RowConv1D if kind == "row" else ColumnConv1D, group, **options)
        return
    options = {"sequence_parallel": False, "_owns_weight": True}
    if kind == "row":
        _become(module, AnyRowLinear, group, input_is_parallel=True, **options)
    elif kind == "head":
        _become(module, VocabParallelClassifier, group, gather_output=True, **options)
    else:
        _become(module, AnyColumnLinear, group, gather_output=False, parts=parts, shared=shared, **options)


def become_embedding(module: nn.Module, group: Group) -> None:
    """Converts an nn.Embedding to one of which each rank has some of the rows. Its parameter must be cut afterwards."""
    _become(module, VocabParallelEmbedding, group, sequence_parallel=False)


def _become(module: nn.Module, kind: type[TensorLayer], group: Group, **attributes: Any) -> None:
    module.__class__ = kind
    vars(module).update(attributes)
    assert isinstance(module, kind)
    module.join(group)


class SplitModule(nn.Module):
    """A module with the forward of its class that knows how its own parameters are split."""

    _told_splits: dict[str, Split]
    _told_partial: tuple[str, ...]

    def splits(self) -> Mapping[str, Split]:
        return self._told_splits

    def partial_gradients(self) -> Collection[str]:
        return self._told_partial


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a forward, of which each rank gets its part.

    Attributes:
        name: name of the parameter of the forward.
        dim: dimension that is split.
        length: size of the blocks that lie one after the other along `dim`, each of which is split; None for one block
            of any size.
    """

    name: str
    dim: int
    length: int | None


class Crossing(nn.Module):
    """A module between whole and split tensors: it takes this rank's part of some arguments, or sums its output over
    the ranks.
    """

    _crossing_arguments: tuple[Argument, ...]
    _crossing_sums: bool
    _crossing_members: Membership


def become_told(module: nn.Module, splits: Mapping[str, Split], partial: Collection[str]) -> None:
    """Adds knowledge about a module's own parameters: how they are split, and which have gradients that are parts of a
    sum.
    """
    if not isinstance(module, SplitModule):
        module.__class__ = _told(type(module))  # type: ignore[arg-type]  # types are hashable
        vars(module).update(_told_splits={}, _told_partial=())
    vars(module).update(
        _told_splits={**vars(module)["_told_splits"], **splits},
        _told_partial=(*vars(module)["_told_partial"], *partial),
    )


def become_crossing(module: nn.Module, arguments: Collection[Argument], sums: bool, group: Group) -> None:
    """Makes a module take its part of some arguments, or return the sum over all ranks."""
    module.__class__ = _crossing(type(module))  # type: ignore[arg-type]  # types are hashable
    vars(module).update(_crossing_arguments=tuple(arguments), _crossing_sums=sums, _crossing_members=Membership(group))


@lru_cache(maxsize=1024)
def _told(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (SplitModule, kind), {"__module__": kind.__module__})


@lru_cache(maxsize=1024)
def _crossing(kind: type[nn.Module]) -> type[nn.Module]:
    stock: Callable[..., Any] = kind.forward
    signature = inspect.signature(stock)

    @wraps(stock)
    def forward(self: Crossing, *args: Any, **kwargs: Any) -> Any:
        group = self._crossing_members.group
        bound = signature.bind(self, *args, **kwargs)
        for argument in self._crossing_arguments:
            if isinstance(given := bound.arguments.get(argument.name), Tensor):
                bound.arguments[argument.name] = _part(given, argument, group, kind.__name__)
        if not self._crossing_sums:
            return stock(*bound.args, **bound.kwargs)
        _, *rest = bound.args
        entered, named = tree_map(lambda leaf: _on_floats(copy_to_tensor_region, leaf, group), (rest, bound.kwargs))
        made = stock(self, *entered, **named)
        return tree_map(lambda leaf: _on_floats(reduce_from_tensor_region, leaf, group), made)

    return type(kind.__name__, (Crossing, kind), {"__module__": kind.__module__, "forward": forward})


def _part(given: Tensor, argument: Argument, group: Group, kind: str) -> Tensor:
    """This rank's part of an argument; its gradient is that of the whole on every rank."""
    whole = copy_to_tensor_region(given, group) if given.requires_grad and torch.is_grad_enabled() else given
    size = whole.shape[argument.dim]
    if size == 1:
        return given  # it is broadcast
    length = size if argument.length is None else argument.length
    if size % length or length % group.size:
        raise UsageError(
            f"{argument.name} of {kind} has size {size} in dimension {argument.dim}, which cannot be split evenly "
            f"over {group.size} tensor ranks"
        )
    dim = argument.dim % whole.dim()
    pieces = whole.unflatten(dim, (size // length, group.size, length // group.size))
    part: Tensor = pieces.select(dim + 1, group.rank).flatten(dim, dim + 1)
    return part


def _on_floats(change: Callable[[Tensor, Group], Tensor], leaf: object, group: Group) -> object:
    return change(leaf, group) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
