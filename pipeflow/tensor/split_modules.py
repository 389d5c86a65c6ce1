"""Modules that keep the forward of their class, and in addition know how their own parameters are split, or take split
arguments or sum their output. Must not contain: layers that compute in another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pipeflow.core.errors import UsageError
from pipeflow.parallel.sharding import Split
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.layer import Membership
from pipeflow.tensor.regions import copy_to_tensor_region, reduce_from_tensor_region


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
