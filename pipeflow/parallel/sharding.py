"""Split: how parameters and buffers lie over the ranks, as the layers that hold them say it, or torch's DTensor does.
Norms, ties, reductions and checkpoints ask here; nobody else knows which layer splits what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeflow.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class Split:
    """A parameter or buffer of which every tensor rank holds an equal part along `dim`, one after the other. `size` is
    that of the whole along `dim`, without what was padded at its end to make the parts equal.

    Where the whole is several blocks along `dim`, such as query, key and value, `blocks` has their sizes; then a rank's
    part is a part of each of them, one after the other, without padding.
    """

    dim: int
    size: int
    blocks: tuple[int, ...] = ()

    def unpadded(self, part: Tensor, rank: int) -> Tensor:
        """What of tensor rank `rank`'s part is no padding, in the memory where it lies."""
        length = part.shape[self.dim]
        return part.narrow(self.dim, 0, min(length, max(0, self.size - rank * length)))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, without padding, of the parts of all tensor ranks."""
        if not self.blocks:
            return torch.cat(list(parts), self.dim).narrow(self.dim, 0, self.size)
        sizes = [block // len(parts) for block in self.blocks]
        blocks = zip(*(part.split(sizes, self.dim) for part in parts), strict=True)
        return torch.cat([piece for block in blocks for piece in block], self.dim)


@runtime_checkable
class Divided(Protocol):
    """A layer that knows how its own parameters lie over the tensor ranks."""

    def splits(self) -> Mapping[str, Split]:
        """Those that are split, by name, and buffers that are; of all others every rank has the whole."""

    def partial_gradients(self) -> Collection[str]:
        """The names of whole parameters whose gradient on one rank is its part of a sum over the tensor ranks."""


@runtime_checkable
class Individual(Protocol):
    """A layer with buffers that are every tensor rank's own, like the first index of its part of a vocabulary."""

    def own_buffers(self) -> Collection[str]:
        """Their names. What follows from the layout is no part of a checkpoint: register them with persistent=False."""


def splits_of(module: nn.Module) -> dict[int, Split]:
    """The split parameters and buffers of `module` and its children, by their id."""
    return {
        id(_tensor_of(layer, name)): split
        for layer in _layers(module, Divided)
        for name, split in layer.splits().items()
    }


def own_buffers_of(module: nn.Module) -> set[int]:
    """The ids of the buffers of `module` and its children that are every tensor rank's own."""
    return {id(layer.get_buffer(name)) for layer in _layers(module, Individual) for name in layer.own_buffers()}


def partial_in(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` whose gradients are to be summed over the tensor ranks, each once."""
    found = {
        id(layer.get_parameter(name)): layer.get_parameter(name)
        for layer in _layers(module, Divided)
        for name in layer.partial_gradients()
    }
    return list(found.values())


def _layers(module: nn.Module, protocol: type) -> Iterator[Any]:
    return (layer for layer in module.modules() if _keeps(type(layer), protocol))  # type: ignore[arg-type]  # types are hashable


@lru_cache(maxsize=1024)
def _keeps(kind: type, protocol: type) -> bool:
    """Remembered per class: to ask takes a tenth of a millisecond, and a norm asks of every layer in every step."""
    return issubclass(kind, protocol)


def _tensor_of(layer: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    module = layer.get_submodule(owner)
    return module.get_buffer(leaf) if leaf in module._buffers else module.get_parameter(leaf)


def is_distributed(tensor: Tensor) -> bool:
    """Whether torch knows of parts of it on other ranks."""
    return isinstance(tensor, DTensor)


def entries_of(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The entries of a parameter's gradient that this rank holds, those of a sparse one alone."""
    local = local_part(settled(gradient, parameter))
    return local.coalesce().values() if local.is_sparse else local


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the memory where it lies."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_first_holder(tensor: Tensor, layout: Layout, rank: int, *, is_split: bool) -> bool:
    """Whether `rank`, this one, is the lowest of the ranks that hold the same part of a tensor. One that `is_split` is
    so over the tensor ranks; a DTensor over the ranks of its mesh.
    """
    spread = {rank}
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        here = mesh.get_coordinate() or ()
        if any(index and placement.is_replicate() for placement, index in zip(tensor.placements, here, strict=True)):
            return False
        spread = set(mesh.mesh.flatten().tolist())
    groups = ([] if is_split else [layout.tensor_ranks(rank)]) + [layout.data_ranks(rank)]
    return all(group[0] == rank or len(spread.intersection(group)) > 1 for group in groups)


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that lies over the ranks as `tensor` does, of which this rank holds `part`."""
    if not isinstance(tensor, DTensor):
        return part
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def settled(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient that lies over the ranks as its parameter does; where it came as parts of a sum, these are added up.
    The ranks that hold the parameter call it together.
    """
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient
