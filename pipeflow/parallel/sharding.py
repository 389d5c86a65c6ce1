"""Split: how parameters lie over the tensor ranks, as the layers that hold them say it. Norms, ties, reductions and
checkpoints ask here; nobody else knows which layer splits what.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn


@dataclass(frozen=True, slots=True)
class Split:
    """A parameter of which every tensor rank holds an equal part along `dim`, one after the other. `size` is that of
    the whole along `dim`, without what was padded at its end to make the parts equal.
    """

    dim: int
    size: int


@runtime_checkable
class Divided(Protocol):
    """A layer that knows how its own parameters lie over the tensor ranks."""

    def splits(self) -> Mapping[str, Split]:
        """Those that are split, by name; of all others every rank has the whole."""

    def partial_gradients(self) -> Collection[str]:
        """The names of whole parameters whose gradient on one rank is its part of a sum over the tensor ranks."""


def splits_of(module: nn.Module) -> dict[int, Split]:
    """The split parameters of `module` and its children, by their id."""
    return {
        id(layer.get_parameter(name)): split
        for layer in module.modules()
        if isinstance(layer, Divided)
        for name, split in layer.splits().items()
    }


def partial_in(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` whose gradients are to be summed over the tensor ranks, each once."""
    found = {
        id(layer.get_parameter(name)): layer.get_parameter(name)
        for layer in module.modules()
        if isinstance(layer, Divided)
        for name in layer.partial_gradients()
    }
    return list(found.values())
