"""Division: how sizes are divided over tensor ranks, and how a full weight is cut into parts. Must not contain: layers
and communication; these are plain numbers and slices.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.sharding import Split
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.torch_private.tensors import assert_async

LOG = logging.getLogger("pipeflow")


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


def real_rows(size: int, rows: int, rank: int) -> int:
    """The number of rows of rank `rank`, out of `rows`, that are not padding, if the whole tensor has `size` rows."""
    return min(rows, max(0, size - rank * rows))


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
    length = real_rows(split.size, rows, group.rank)
    shape = list(whole.shape)
    shape[split.dim] = rows
    part = whole.new_zeros(shape)
    part.narrow(split.dim, 0, length).copy_(whole.narrow(split.dim, start, length))
    return part


def adopt(
    layer: nn.Module, native: Mapping[str, nn.Parameter | None], splits: Mapping[str, Split], group: Group
) -> None:
    """Gives `layer` this rank's part of each full parameter of a stock layer, by name; parameters that are None are
    skipped.
    """
    for name, whole in native.items():
        if whole is not None:
            part = nn.Parameter(cut(whole, splits.get(name), group), requires_grad=whole.requires_grad)
            layer.register_parameter(name, part)


def require_indices(indices: Tensor, size: int, what: str) -> None:
    """Raises UsageError unless all `indices` are from 0 to `size` - 1. On a GPU a device assertion fails instead, so
    that the host does not wait.
    """
    if indices.device.type == "cpu":
        if bool(((indices < 0) | (indices >= size)).any()):
            raise UsageError(f"{what} must be from 0 to {size - 1}, got {int(indices.min())} to {int(indices.max())}")
    elif indices.device.type != "meta":
        assert_async(((indices >= 0) & (indices < size)).all())
