"""How sizes are divided over tensor ranks, and how a full weight is cut into its parts. Plain numbers and slices; no
layer, no communication.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.parallel.sharding import Split
from pipeflow.parallel.transport.group import Group

LOG = logging.getLogger("pipeflow")


def divide(layer: str, name: str, size: int, parts: int) -> int:
    """The size of each of `parts` equal parts. Raises UsageError, naming `layer` and what is split (`name`), where it
    does not come out even.

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
    """The rows of each rank, the last ranks' padded at their end, as torch.chunk would cut them. Logged once."""
    rows = -(-size // group.size)
    if rows * group.size > size and group.rank == 0:
        LOG.info("%s pads %s=%d to %d: %d rows on each of %d", layer, name, size, rows * group.size, rows, group.size)
    return rows


def real_rows(size: int, rows: int, rank: int) -> int:
    """How many of the `rows` of `rank` are not padding, when the whole has `size`."""
    return min(rows, max(0, size - rank * rows))


def whole_shape(part: Tensor, split: Split | None) -> tuple[int, ...]:
    """The shape of the full tensor, without padding, of which a rank holds `part`."""
    shape = list(part.shape)
    if split is not None:
        shape[split.dim] = split.size
    return tuple(shape)


def cut(whole: Tensor, split: Split | None, group: Group) -> Tensor:
    """This rank's part of `whole`: a contiguous copy, with zeros where it is padded. No split: a copy of all of it."""
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
    """Gives `layer` this rank's part of the full parameters of a stock layer, by name; those that are None it lacks."""
    for name, whole in native.items():
        if whole is not None:
            part = nn.Parameter(cut(whole, splits.get(name), group), requires_grad=whole.requires_grad)
            layer.register_parameter(name, part)


def require_indices(indices: Tensor, size: int, what: str) -> None:
    """Raises UsageError unless all of `indices` are from 0 to `size` - 1; on a GPU, which is not waited for, the
    device's own assertion fails instead.
    """
    if indices.device.type == "cpu":
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < size):
            raise UsageError(f"{what} must be from 0 to {size - 1}, got {int(indices.min())} to {int(indices.max())}")
    elif indices.device.type != "meta":
        torch._assert_async(((indices >= 0) & (indices < size)).all())
