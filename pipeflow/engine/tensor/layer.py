"""The common parts of all layers here: their group, how sizes are divided over the tensor ranks, and how a full weight
is cut into parts; and LayerNorm, which is whole on every rank. If the sequence is split, each rank computes a part of
its gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import context_if_launched
from pipeflow.engine.parallel.sharding import Split
from pipeflow.engine.parallel.transport.protocol import Alone, Group
from pipeflow.engine.torch_private.tensors import assert_async

LOG = logging.getLogger("pipeflow")


def group_of(group: Group | None) -> Group:
    """`group` itself; if it is None, the tensor group of the context, or a group of one rank without a launch."""
    if group is not None:
        return group
    context = context_if_launched()
    return Alone() if context is None else context.tensor


class Membership:
    """Holds a group, whose channels cannot be copied: a copied layer stays in the same group."""

    __slots__ = ("group",)

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, memo: object) -> Membership:
        return self


class TensorLayer(nn.Module):
    """Base class of tensor-parallel layers. The layer, not the parameter, knows how a parameter is split, so this
    survives `to_empty` and anything else that replaces a parameter.
    """

    _membership: Membership
    _eager: Callable[..., Any] | None = None

    def join(self, group: Group | None) -> Group:
        """Sets the group of the layer; None is handled by `group_of`. Call it before the layer has parameters."""
        self._membership = Membership(group_of(group))
        return self.group

    @property
    def group(self) -> Group:
        return self._membership.group

    @property
    def compiles(self) -> bool:
        """True if torch.compile can compile the layer, because it waits for no other rank."""
        return self.group.size == 1

    def leave_eager(self) -> None:
        """Makes compiled code call this layer uncompiled."""
        self._eager = call_eagerly()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the module. While torch.compile compiles, a layer that was told to stays outside the compiled code."""
        if self._eager is not None and torch.compiler.is_compiling():
            return self._eager(self, *arguments, **keywords)
        return super().__call__(*arguments, **keywords)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the Deferral out: copies defer nothing until they are told to."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's
        return {name: value for name, value in state.items() if name not in ("deferral", "_eager")}

    def splits(self) -> Mapping[str, Split]:
        """The splits of this layer's own parameters, by name; parameters that are not split are left out."""
        return {}

    def _get_name(self) -> str:
        return type(self).__name__

    def partial_gradients(self) -> Collection[str]:
        """Names of whole parameters whose gradient on each rank must be summed over the ranks."""
        return ()

    @classmethod
    def _require_native(cls, module: nn.Module, stock: type[nn.Module]) -> None:
        """Raises UsageError unless `module`, from which a layer is made, is of torch's class `stock`."""
        if not isinstance(module, stock):
            raise UsageError(f"{cls.__name__} is made from an nn.{stock.__name__}, got {type(module).__name__}")

    def _adopt(self, native: nn.Module, but: Collection[str] = ()) -> Self:
        """Takes this rank's part of each full parameter of a stock layer, except those in `but`, and its mode."""
        splits = self.splits()
        for name, whole in native._parameters.items():
            if whole is not None and name not in but:
                part = nn.Parameter(cut(whole, splits.get(name), self.group), requires_grad=whole.requires_grad)
                self.register_parameter(name, part)
        return self.train(native.training)


@cache
def call_eagerly() -> Callable[..., Any]:
    """A module's call that ends compiled code. It is the same object for all layers, so that they can share code."""
    call: Callable[..., Any] = torch.compiler.disable(nn.Module.__call__, reason="a tensor-parallel layer")
    return call


class LayerNorm(nn.LayerNorm, TensorLayer):
    """nn.LayerNorm, whole on every rank.

    Args:
        normalized_shape, eps, elementwise_affine, bias: as in nn.LayerNorm.
        sequence_parallel: the input is this rank's piece of the sequence. The gradients of the parameters are then
            parts of a sum over the ranks, as `partial_gradients` reports.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.join(group)
        self.sequence_parallel = sequence_parallel

    @property
    def compiles(self) -> bool:
        """True, because it never waits for another rank."""
        return True

    def partial_gradients(self) -> Collection[str]:
        if not self.sequence_parallel or self.group.size == 1:
            return ()
        return [name for name, parameter in self._parameters.items() if parameter is not None]

    @classmethod
    def from_native_module(cls, module: nn.LayerNorm, group: Group | None = None, **options: Any) -> Self:
        """A copy of `module`, which is not changed. `options` are other arguments of this class."""
        cls._require_native(module, nn.LayerNorm)
        affine, bias = module.elementwise_affine, module.bias is not None
        layer = cls(module.normalized_shape, module.eps, affine, bias, device="meta", group=group, **options)
        return layer._adopt(module)


def divide(layer: str, name: str, size: int, parts: int) -> int:
    """The size of each of `parts` equal parts of `size`.

    Raises UsageError if `parts` does not divide `size`; the error names `layer` and what is split (`name`).

    >>> divide("attention", "heads", 12, 4)
    3
    """
    if size % parts:
        raise UsageError(
            f"{layer} cannot split {name}={size} over {parts} tensor ranks: choose a tensor size that divides "
            f"{size}, or make {name} a multiple of {parts}"
        )
    return size // parts


def divide_padded(layer: str, name: str, size: int, group: Group) -> int:
    """The number of rows on each rank, rounded up; the parts of the last ranks are padded at their end. Logged once."""
    rows = -(-size // group.size)
    if rows * group.size > size and group.rank == 0:
        LOG.info("%s pads %s=%d to %d: %d rows on each of %d", layer, name, size, rows * group.size, rows, group.size)
    return rows


def whole_shape(part: Tensor, split: Split | None) -> tuple[int, ...]:
    """The shape of the full tensor, without padding, of which a rank holds `part`."""
    shape = list(part.shape)
    if split is not None:
        shape[split.dim] = split.size
    return tuple(shape)


def cut(whole: Tensor, split: Split | None, group: Group) -> Tensor:
    """This rank's part of `whole` as a contiguous copy, with zeros for padding. Without a split, a copy of `whole`."""
    whole = whole.detach()
    if split is None or group.size == 1:
        return whole.clone()
    if split.blocks:
        pieces = (block.chunk(group.size, split.dim)[group.rank] for block in whole.split(split.blocks, split.dim))
        return torch.cat(list(pieces), split.dim)
    rows = -(-split.size // group.size)
    start = min(group.rank * rows, split.size)
    shape = list(whole.shape)
    shape[split.dim] = rows
    part = whole.new_zeros(shape)
    own = split.unpadded(part, group.rank)
    own.copy_(whole.narrow(split.dim, start, own.shape[split.dim]))
    return part


def require_indices(indices: Tensor, size: int, what: str) -> None:
    """Raises UsageError unless all `indices` are from 0 to `size` - 1. On a GPU a device assertion fails instead, so
    that the host does not wait.
    """
    if indices.device.type == "cpu":
        if bool(((indices < 0) | (indices >= size)).any()):
            raise UsageError(f"{what} must be from 0 to {size - 1}, got {int(indices.min())} to {int(indices.max())}")
    elif indices.device.type != "meta":
        assert_async(((indices >= 0) & (indices < size)).all())
