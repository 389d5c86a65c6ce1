"""What all layers here have in common: the group they are split over, how their parameters lie over it, and how
weight gradients are left for later. No layer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from pipeflow.deferral.layers import Deferring
from pipeflow.parallel.context import context_if_launched
from pipeflow.parallel.sharding import Split
from pipeflow.parallel.transport.group import Alone, Group


def group_of(group: Group | None) -> Group:
    """The group itself; for None the tensor group of the context, and without a launch the group of one."""
    if group is not None:
        return group
    context = context_if_launched()
    return Alone() if context is None else context.tensor


class Membership:
    """Holds a group, whose channels cannot be copied: the copy of a layer is in the same group."""

    __slots__ = ("group",)

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, memo: object) -> Membership:
        return self


class TensorLayer(nn.Module):
    """A layer of a tensor-parallel model. How parameters are split is said here, not on them, so that it outlives
    `to_empty` and whatever else replaces a parameter.
    """

    _membership: Membership
    _eager: Callable[..., Any] | None = None

    def join(self, group: Group | None) -> Group:
        """Makes the layer one of `group`; None is as for `group_of`. Before the layer has parameters."""
        self._membership = Membership(group_of(group))
        return self.group

    @property
    def group(self) -> Group:
        return self._membership.group

    @property
    def compiles(self) -> bool:
        """Whether torch.compile sees what the layer does, which waits for no other rank then."""
        return self.group.size == 1

    def leave_eager(self) -> None:
        """Has compiled code call this layer as it is."""
        self._eager = _call_eagerly()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """As any module's."""
        if self._eager is not None and torch.compiler.is_compiling():
            return self._eager(self, *arguments, **keywords)
        return super().__call__(*arguments, **keywords)

    def __getstate__(self) -> dict[str, Any]:
        """Copies defer nothing until they are told to."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's
        return {name: value for name, value in state.items() if name not in ("deferral", "_eager")}

    def splits(self) -> Mapping[str, Split]:
        """Of this layer's own parameters those that are split, by name."""
        return {}

    def _get_name(self) -> str:
        return type(self).__name__

    def partial_gradients(self) -> Collection[str]:
        """The names of whole parameters whose gradient on one rank is its part of a sum over the ranks."""
        return ()


@cache
def _call_eagerly() -> Callable[..., Any]:
    """A module's call, at which compiled code ends. The same one for all layers, which may share that code."""
    call: Callable[..., Any] = torch.compiler.disable(nn.Module.__call__, reason="a tensor-parallel layer")
    return call


class DeferringTensorLayer(TensorLayer, Deferring):
    """A layer whose weight gradient is a product that a Deferral can take."""
