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
from pipeflow.engine.parallel.grid import GridGroups
from pipeflow.engine.parallel.sharding import Split, real_rows
from pipeflow.engine.parallel.transport.protocol import Alone, Group
from pipeflow.engine.tensor.grid import grid_layer_norm, require_divisible, require_ungathered
from pipeflow.engine.torch_private.tensors import assert_async

LOG = logging.getLogger("pipeflow")


def group_of(group: Group | None) -> Group:
    """`group` itself; if it is None, the tensor group of the context, or a group of one rank without a launch."""
    if group is not None:
        return group
    context = context_if_launched()
    return Alone() if context is None else context.tensor


def grid_here(group: Group | None = None) -> GridGroups | None:
    """The groups of this rank's grid, for a layer that is made with `group`. None if tensor ranks form no grid, and for
    a group other than the context's tensor ranks.
    """
    context = context_if_launched()
    return context.grid if context is not None and group in (None, context.tensor) else None


def feature_parts() -> int:
    """The number of parts into which tensor ranks divide the outputs of a column-parallel layer, such as its heads."""
    grid = grid_here()
    return group_of(None).size if grid is None else grid.grid.side


class Membership:
    """Holds a group, and the groups of its grid if there is one. Their channels cannot be copied: a copied layer stays
    in the same group.
    """

    __slots__ = ("grid", "group")

    def __init__(self, group: Group, grid: GridGroups | None = None) -> None:
        self.group, self.grid = group, grid

    def __deepcopy__(self, memo: object) -> Membership:
        return self


class WaitingLayer(nn.Module):
    """A layer that waits for other ranks in its calls, which torch.compile cannot compile."""

    _eager: Callable[..., Any] | None = None

    @property
    def compiles(self) -> bool:
        """True if torch.compile can compile the layer, because it waits for no other rank."""
        return False

    def leave_eager(self) -> None:
        """Makes compiled code call this layer uncompiled."""
        self._eager = call_eagerly()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the module. While torch.compile compiles, a layer that was told to stays outside the compiled code."""
        if self._eager is not None and torch.compiler.is_compiling():
            return self._eager(self, *arguments, **keywords)
        return super().__call__(*arguments, **keywords)


class TensorLayer(WaitingLayer):
    """Base class of tensor-parallel layers. The layer, not the parameter, knows how a parameter is split, so this
    survives `to_empty` and anything else that replaces a parameter.
    """

    _membership: Membership

    def join(self, group: Group | None) -> Group:
        """Sets the group of the layer; None is handled by `group_of`. Call it before the layer has parameters."""
        self._membership = Membership(group_of(group), grid_here(group))
        return self.group

    @property
    def grid(self) -> GridGroups | None:
        """The groups of the grid of tensor ranks on which the layer computes; None in tensor mode "1d"."""
        return self._membership.grid

    @property
    def group(self) -> Group:
        return self._membership.group

    @property
    def compiles(self) -> bool:
        """True if torch.compile can compile the layer, because it waits for no other rank."""
        return self.group.size == 1

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
    """nn.LayerNorm, whole on every rank. On a grid, which divides the features of its input, ranks exchange two numbers
    per token.

    Args:
        normalized_shape, eps, elementwise_affine, bias: as in nn.LayerNorm.
        sequence_parallel: the input is this rank's piece of the sequence. The gradients of the parameters are then
            parts of a sum over the ranks, as `partial_gradients` reports.
        dtype, device: of the parameters, as in torch.
        group: the tensor ranks; by default the tensor group of the context, or a group of one without a launch.

    On a grid, raises UsageError for sequence_parallel, and for features that it does not divide.
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
        require_ungathered(self._get_name(), self.grid, sequence_parallel=sequence_parallel)
        if self.grid is not None:
            require_divisible(self._get_name(), self.grid, "normalized_shape", self.normalized_shape)

    def forward(self, input: Tensor) -> Tensor:
        if self.grid is None:
            return super().forward(input)
        return grid_layer_norm(self.grid, input, self.weight, self.bias, self.eps)

    @property
    def compiles(self) -> bool:
        """True if it never waits for another rank, as without a grid."""
        return self.grid is None

    def partial_gradients(self) -> Collection[str]:
        if self.grid is None and (not self.sequence_parallel or self.group.size == 1):
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


def divide_padded(layer: str, name: str, size: int, group: Group, parts: int | None = None) -> int:
    """The number of rows of each of `parts`, by default one for each rank, rounded up; the last parts are padded at
    their end. Logged once.
    """
    parts = group.size if parts is None else parts
    rows = -(-size // parts)
    if rows * parts > size and group.rank == 0:
        LOG.info("%s pads %s=%d to %d: %d rows on each of %d", layer, name, size, rows * parts, rows, parts)
    return rows


def whole_shape(part: Tensor, split: Split | None) -> tuple[int, ...]:
    """The shape of the full tensor, without padding, of which a rank holds `part`."""
    return tuple(part.shape) if split is None else split.whole_shape(part.shape)


def cut(whole: Tensor, split: Split | None, group: Group) -> Tensor:
    """This rank's part of `whole` as a contiguous copy, with zeros for padding. Without a split, a copy of `whole`."""
    whole = whole.detach()
    if split is None or group.size == 1:
        return whole.clone()
    if split.then is not None:
        whole = cut(whole, split.then, group)
    place, parts = split.place(group.rank), split.parts(group.size)
    if split.blocks:
        pieces = (block.chunk(parts, split.dim)[place] for block in whole.split(split.blocks, split.dim))
        return torch.cat(list(pieces), split.dim)
    rows = -(-split.size // parts)
    start = min(place * rows, split.size)
    shape = list(whole.shape)
    shape[split.dim] = rows
    part = whole.new_zeros(shape)
    own = part.narrow(split.dim, 0, real_rows(split.size, rows, place))
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
