"""Sharding: how parameters and buffers are distributed over ranks, according to the layers that hold them or to torch's
DTensor. Norms, ties, reductions and checkpoints ask here; no other code knows which layer splits what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeflow.engine.parallel.layout import WorldLayout


def real_rows(size: int, rows: int, rank: int) -> int:
    """The number of rows of rank `rank`, out of `rows`, that are not padding, if the whole tensor has `size` rows."""
    return min(rows, max(0, size - rank * rows))


def own_tokens(tensor: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    """The tokens of context rank `rank` out of `ranks`, along `dim`: its `token_parts`. Under a causal mask these have
    equally many scores on each rank.
    """
    parts = tensor.chunk(2 * ranks, dim)
    return torch.cat([parts[part] for part in token_parts(rank, ranks)], dim)


def token_parts(rank: int, ranks: int) -> tuple[int, int]:
    """The two of 2 `ranks` equal parts of a sequence that context rank `rank` holds."""
    return rank, 2 * ranks - 1 - rank


def all_tokens(own: Sequence[Tensor], dim: int) -> Tensor:
    """The tokens of a sequence along `dim`, from those of each context rank."""
    first, second = zip(*(each.chunk(2, dim) for each in own), strict=True)
    return torch.cat([*first, *reversed(second)], dim)


@dataclass(frozen=True, slots=True)
class Split:
    """A parameter or buffer that is split along `dim`: tensor ranks hold equal parts, in rank order. On a grid of
    tensor ranks it may be split along two dimensions.

    Attributes:
        dim: the dimension that is split.
        size: size of the whole along `dim`, without the padding at its end that makes the parts equal.
        blocks: sizes along `dim` of the blocks of a packed weight, such as query, key and value. A rank then holds a
            part of each block, one after the other, without padding. Empty if the weight is one block.
        places: for each tensor rank, in rank order, which part along `dim` it holds. Empty if each holds the part of
            its own rank.
        then: the split along another dimension of the parts that this one makes; None if there is no other.
    """

    dim: int
    size: int
    blocks: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    then: Split | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that are split."""
        return (self.dim,) if self.then is None else (self.dim, *self.then.dims)

    def place(self, rank: int) -> int:
        """Which part along `dim` tensor rank `rank` holds."""
        return self.places[rank] if self.places else rank

    def parts(self, ranks: int) -> int:
        """The number of parts along `dim`, of so many tensor ranks."""
        return max(self.places) + 1 if self.places else ranks

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole without padding, from that of a part."""
        shape = list(part)
        shape[self.dim] = self.size
        return tuple(shape) if self.then is None else self.then.whole_shape(shape)

    def unpadded(self, part: Tensor, rank: int) -> Tensor:
        """The part of tensor rank `rank` without padding, as a view of `part`."""
        own = part.narrow(self.dim, 0, real_rows(self.size, part.shape[self.dim], self.place(rank)))
        return own if self.then is None else self.then.unpadded(own, rank)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor without padding, made of the parts of all tensor ranks in rank order."""
        along = list(parts)
        if self.places:
            along = [self._joined_at(place, parts) for place in range(self.parts(len(parts)))]
        if not self.blocks:
            return torch.cat(along, self.dim).narrow(self.dim, 0, self.size)
        sizes = [block // len(along) for block in self.blocks]
        blocks = zip(*(part.split(sizes, self.dim) for part in along), strict=True)
        return torch.cat([piece for block in blocks for piece in block], self.dim)

    def _joined_at(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        """The part at `place` along `dim`, whole along the other dimension."""
        ranks = [rank for rank, its in enumerate(self.places) if its == place]
        if self.then is None:
            return parts[ranks[0]]
        then = replace(self.then, places=tuple(self.then.place(rank) for rank in ranks))
        return then.joined([parts[rank] for rank in ranks])


@runtime_checkable
class Divided(Protocol):
    """A layer that knows how its own parameters are split over the tensor ranks."""

    def splits(self) -> Mapping[str, Split]:
        """The split of each parameter or buffer that is split, by name; every rank holds all others whole."""

    def partial_gradients(self) -> Collection[str]:
        """Names of whole parameters whose gradient on each rank must be summed over the tensor ranks."""


@runtime_checkable
class HoldsExperts(Protocol):
    """A layer that knows how its own parameters are divided over the expert ranks."""

    def expert_splits(self) -> Mapping[str, Split]:
        """The split of each parameter over the expert ranks, by name. Tensor ranks may split it, too, along another
        dimension.
        """


@runtime_checkable
class Individual(Protocol):
    """A layer with buffers that differ between tensor ranks, such as the first index of a part of a vocabulary."""

    def own_buffers(self) -> Collection[str]:
        """Names of these buffers. Checkpoints must not contain them: register them with persistent=False."""


def splits_of(module: nn.Module) -> dict[int, Split]:
    """The splits of the parameters and buffers of `module` and its children, by the id of the tensor."""
    return {
        id(_tensor_of(layer, name)): split
        for layer in _layers(module, Divided)
        for name, split in layer.splits().items()
    }


def expert_splits_of(module: nn.Module) -> dict[int, Split]:
    """The splits over the expert ranks of the parameters of `module` and its children, by the id of the parameter."""
    return {
        id(layer.get_parameter(name)): split
        for layer in _layers(module, HoldsExperts)
        for name, split in layer.expert_splits().items()
    }


def own_buffers_of(module: nn.Module) -> set[int]:
    """The ids of the buffers of `module` and its children that differ between tensor ranks."""
    return {id(layer.get_buffer(name)) for layer in _layers(module, Individual) for name in layer.own_buffers()}


def partial_in(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` whose gradients must be summed over the tensor ranks, each once."""
    layers = _layers(module, Divided)
    return list(dict.fromkeys(layer.get_parameter(name) for layer in layers for name in layer.partial_gradients()))


def _layers(module: nn.Module, protocol: type) -> Iterator[Any]:
    return (layer for layer in module.modules() if _keeps(type(layer), protocol))  # type: ignore[arg-type]  # types are hashable


@lru_cache(maxsize=1024)
def _keeps(kind: type, protocol: type) -> bool:
    """Cached per class: a check takes a tenth of a millisecond, and a norm checks every layer in every step."""
    return issubclass(kind, protocol)


def _tensor_of(layer: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    module = layer.get_submodule(owner)
    return module.get_buffer(leaf) if leaf in module._buffers else module.get_parameter(leaf)


def is_distributed(tensor: Tensor) -> bool:
    """Returns True if the tensor is a DTensor, of which other ranks may hold parts."""
    return isinstance(tensor, DTensor)


def entries_of(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The entries of a parameter's gradient that this rank holds; of a sparse gradient, its values only."""
    local = local_part(settled(gradient, parameter))
    return local.coalesce().values() if local.is_sparse else local


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_values(tensor: Tensor) -> Tensor:
    """The rank's own values of a tensor of any engine, which may still be on their way."""
    if hasattr(tensor, "to_replicate"):  # a ColoTensor, with which all functions of torch see the whole
        return tensor.as_subclass(Tensor)
    inner = getattr(tensor, "to_local", None)
    found: Tensor = tensor if inner is None else inner()
    return found.wait() if type(found).__name__ == "AsyncCollectiveTensor" else found  # type: ignore[attr-defined]  # it has it


def is_first_holder(tensor: Tensor, layout: WorldLayout, rank: int, *, is_split: bool, is_expert: bool) -> bool:
    """Returns True if `rank`, which must be this rank, is the lowest of the ranks that hold the same part of a tensor.

    A tensor with `is_split` is split over the tensor ranks, one with `is_expert` over the expert ranks, a DTensor over
    the ranks of its mesh.
    """
    spread = {rank}
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        here = mesh.get_coordinate() or ()
        if any(index and placement.is_replicate() for placement, index in zip(tensor.placements, here, strict=True)):
            return False
        spread = set(mesh.mesh.flatten().tolist())
    copies = layout.expert_copy_ranks(rank) if is_expert else layout.copy_ranks(rank)
    groups = ([] if is_split else [layout.tensor_ranks(rank)]) + [copies]
    return all(group[0] == rank or len(spread.intersection(group)) > 1 for group in groups)


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """A tensor distributed over the ranks like `tensor`, of which this rank holds `part`."""
    if not isinstance(tensor, DTensor):
        return part
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def settled(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient, distributed over the ranks like its parameter; partial sums are added up.

    All ranks that hold the parameter must call this together.
    """
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient
