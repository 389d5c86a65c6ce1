"""First values that do not depend on the tensor size: every rank draws the full weight, block by block, and keeps its
part. What must not live here: which distribution a layer has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Generator, Tensor, nn

from pipeflow.parallel.sharding import Split
from pipeflow.tensor.division import whole_shape
from pipeflow.tensor.layer import TensorLayer

Draw = Callable[[Tensor], object]
"""Fills a tensor in place with values that are independent of each other and of its shape."""

Fill = Callable[[str, Tensor, Generator], object]
"""Fills a block of the full parameter of that name in place, drawing from the generator, as a Draw does."""

_BLOCK = 2**24  # elements
_GRAIN = 16  # torch draws normal numbers in sixteens: blocks of whole ones take the numbers that one draw would


@torch.no_grad()
def draw_part_(part: Tensor, draw: Draw, *, split: Split | None, rank: int) -> None:
    """Fills `part` with what `rank` holds of the full tensor; padding gets zeros, a meta tensor nothing.

    On the CPU a generator gives the numbers that one draw of the full tensor would take from it, and is left where
    that would leave it. Needs a block of 64 MiB (of float32) beside the part.
    """
    if part.is_meta:
        return
    shape = whole_shape(part, split)
    if shape == tuple(part.shape):
        for start, stop in _row_blocks(shape):
            draw(part[start:stop])
        return
    part.zero_()
    for start, stop in _row_blocks(shape):
        block = part.new_empty(stop - start, *shape[1:])
        draw(block)
        _keep(part, block, start, split, rank)


@torch.no_grad()
def initialize_(module: nn.Module, fill: Fill, *, seed: int, prefix: str = "") -> None:
    """Fills the parameters of `module`, whichever layers hold them, with values that depend only on `seed` and on
    their names: not on the tensor size, the device, or what else was drawn. For layers made on the meta device, after
    `to_empty`; a rank allocates a block beside its parts, and draws only the blocks of rows that it holds some of.

    Args:
        fill: called as `fill(name, block, generator)` with a block of rows of the full parameter, on the CPU.
        seed: the same on every rank.
        prefix: the name of `module` in the whole model, as for `nn.Module.named_parameters`, so that the layers of
            different pipeline stages differ and stay what they are under another number of stages.
    """
    places = {
        id(layer.get_parameter(name)): (split, layer.group.rank)
        for layer in module.modules()
        if isinstance(layer, TensorLayer)
        for name, split in layer.splits().items()
    }
    for name, parameter in module.named_parameters(prefix=prefix):
        if not parameter.is_meta:
            _fill_part(torch.atleast_1d(parameter), fill, name, seed, *places.get(id(parameter), (None, 0)))


def _fill_part(part: Tensor, fill: Fill, name: str, seed: int, split: Split | None, rank: int) -> None:
    shape = whole_shape(part, split)
    part.zero_()
    for start, stop in _row_blocks(shape):
        if split is not None and split.dim == 0 and not _overlap(part, start, stop, rank):
            continue
        block = torch.empty(stop - start, *shape[1:], dtype=part.dtype)
        fill(name, block, Generator().manual_seed(_seed_of(seed, name, start)))
        _keep(part, block, start, split, rank)


def _row_blocks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """From where to where the rows of each block of a full tensor go. A last block too small to stand alone joins
    the one before.
    """
    rows = shape[0]
    step = max(1, _BLOCK // max(1, prod(shape[1:])) // _GRAIN) * _GRAIN
    start = 0
    while start < rows:
        stop = start + step if rows - start - step >= _GRAIN else rows
        yield start, stop
        start = stop


def _overlap(part: Tensor, start: int, stop: int, rank: int) -> range:
    """The rows of a block that `rank` holds, counted in the full tensor."""
    return range(max(start, rank * len(part)), min(stop, (rank + 1) * len(part)))


def _keep(part: Tensor, block: Tensor, start: int, split: Split | None, rank: int) -> None:
    """Copies out of a block, which starts at row `start` of the full tensor, what belongs to the part of `rank`."""
    if split is None:
        part[start : start + len(block)] = block
    elif split.dim == 0:
        rows = _overlap(part, start, start + len(block), rank)
        first = rank * len(part)
        if rows:
            part[rows.start - first : rows.stop - first] = block[rows.start - start : rows.stop - start]
    else:
        width = part.shape[split.dim]
        part[start : start + len(block)] = block.narrow(split.dim, rank * width, width)


def _seed_of(*what: object) -> int:
    digest = hashlib.sha256("/".join(map(str, what)).encode()).digest()
    return int.from_bytes(digest[:7])
