"""Sketches: a few numbers for a tensor of any size, linear in it. The sketch of a sum is the sum of the sketches, so
the parts of a tensor on many ranks, or the gradients of many samples, add up without their values.

A sketch has the products of the tensor with PROBES probes. A probe is an outer product of vectors of random signs, one
for each dimension, so E[(probe . x)^2] = |x|^2: the root mean square of a sketch estimates the norm (Alon, Matias and
Szegedy, "The space complexity of approximating the frequency moments", 1996). The sketch of a linear layer's weight
gradient is a product of two small sketches, those of its inputs and of the gradients of its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

PROBES = 8
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64


def _mixed(numbers: Tensor) -> Tensor:
    """The numbers, int64, with all bits mixed by splitmix64."""
    mixed = numbers * _MULTIPLIERS[0]
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return mixed ^ ((mixed >> 31) & ((1 << 33) - 1))


def _by_probe(values: Tensor) -> Tensor:
    """The same values, those of a probe side by side in memory: thin products take half the time."""
    return values.t().contiguous().t()


@lru_cache(maxsize=512)
def signs(dim: int, start: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The entries `start` to `start + length` of the vectors of dimension `dim`, [length, PROBES]. They depend on the
    place alone, so ranks and machines agree.
    """
    places = torch.arange(start, start + length, device=device)[:, None] * PROBES
    numbers = places + torch.arange(PROBES, device=device) + (dim << 48) + 1
    return _by_probe(((_mixed(numbers) & 2) - 1).to(dtype))


def products(offset: Sequence[int], shape: Sequence[int], first: int, like: Tensor) -> Tensor:
    """The probes of a block at this offset, whose first dimension is number `first`: [entries, PROBES]."""
    found = torch.ones(1, PROBES, dtype=like.dtype, device=like.device)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True), start=first):
        found = (found[:, None] * signs(dim, start, length, like.dtype, like.device)).reshape(-1, PROBES)
    return _by_probe(found)


def exact(tensor: Tensor) -> Tensor:
    """The detached values in a dtype whose sums lose little: float32, or float64 for float64 and integers. Complex
    numbers have their parts along one more dimension.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.float64)


def product(values: Tensor, probes: Tensor) -> Tensor:
    """The matrix product in the dtype of its factors, under autocast, too."""
    with torch.autocast(values.device.type, enabled=False) if values.device.type != "meta" else nullcontext():
        return values @ probes


class Block(NamedTuple):
    """Values that are a contiguous block of a whole tensor, and the block's offset there.

    Attributes:
        values: the block.
        offset: index of its first entry along each dimension of the whole.
    """

    values: Tensor
    offset: tuple[int, ...]


def sketch(block: Block) -> Tensor:
    """The sketch of the block's values, float64 [PROBES]."""
    values = exact(block.values)
    offset = (*block.offset, 0)[: values.dim()]
    if not values.dim():
        return values.reshape(1).to(torch.float64).expand(PROBES).clone()
    if not values.numel():
        return torch.zeros(PROBES, dtype=torch.float64, device=values.device)
    first = signs(0, offset[0], values.shape[0], values.dtype, values.device)
    if values.dim() == 1:
        return product(values, first).to(torch.float64)
    rest = products(offset[1:], values.shape[1:], 1, values)
    return (product(values.reshape(len(values), -1), rest) * first).sum(0, dtype=torch.float64)


def norm_squared(values: Tensor) -> Tensor:
    """The sum of the squares, float64."""
    norm: Tensor = torch.linalg.vector_norm(exact(values))
    return norm.to(torch.float64).square()


def row_sketches(values: Tensor, offset: Sequence[int]) -> Tensor:
    """For each row of `values`, [rows, ...], its sketch and the square of its norm: float64 [rows, PROBES + 1]. The
    last dimension is number 0, as that of a layer's output is the first of its weight; `offset` has one entry for each
    dimension but the first.
    """
    offset = (*offset, *(0,) * values.is_complex())
    values = exact(values)
    if values.dim() < 2:
        values = values.reshape(-1, 1)
        offset = (0,)
    rows = values.reshape(len(values), -1)
    last = signs(0, offset[-1], values.shape[-1], values.dtype, values.device)
    found = product(values, last)
    if values.dim() > 2:
        middle = products(offset[:-1], values.shape[1:-1], 2, values)
        found = (found.reshape(len(values), -1, PROBES) * middle).sum(1)
    norms = torch.linalg.vector_norm(rows, dim=1)
    return torch.cat([found, norms.square()[:, None]], 1).to(torch.float64)


def flat_blocks(values: Tensor, start: int, shape: Sequence[int]) -> Iterator[Block]:
    """The blocks of a flat range: its `values`, [entries], begin at entry `start` of a whole of `shape`."""
    if len(shape) < 2:
        yield Block(values, (start,) * len(shape))
        return
    width = prod(shape[1:])
    while len(values):
        row, column = divmod(start, width)
        many = len(values) // width * width if not column else 0
        taken = many or min(width - column, len(values))
        if many:
            yield Block(values[:many].reshape(-1, *shape[1:]), (row, *(0 for _ in shape[1:])))
        else:
            yield from (
                Block(each.values[None], (row, *each.offset)) for each in flat_blocks(values[:taken], column, shape[1:])
            )
        values, start = values[taken:], start + taken
