"""Initial values that do not depend on the tensor size: every rank draws the full weight block by block and keeps its
part. Must not contain: the distributions of particular layers.
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
"""Fills a tensor in place with values that do not depend on each other or on its shape."""

Fill = Callable[[str, Tensor, Generator], object]
"""Fills a block of the full parameter of the given name in place, like a Draw, with numbers from the generator."""

_BLOCK = 2**24  # elements
_GRAIN = 16  # torch draws normal numbers in groups of 16, so blocks of whole groups get the numbers of one draw


@torch.no_grad()
def draw_part_(part: Tensor, draw: Draw, *, split: Split | None, rank: int) -> None:
    """Fills `part` with the part of `rank` of a full tensor that `draw` fills. Padding becomes zero; a meta tensor is
    skipped.

    On the CPU, numbers and the final state of the generator are those of one draw of the full tensor. Needs a block of
    64 MiB (of float32) in addition to the part.
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
    """Fills the parameters of `module` with values that depend only on `seed` and on their names, not on the tensor
    size, the device, or earlier draws.

    For layers that were made on the meta device, after `to_empty`. A rank allocates one block in addition to its parts,
    and draws only blocks of which it holds some rows.

    Args:
        module: module to fill; its layers may be of any class.
        fill: called as `fill(name, block, generator)` with a block of rows of the full parameter, on the CPU.
        seed: seed, the same on every rank.
        prefix: name of `module` in the whole model, as in `nn.Module.named_parameters`, so that layers of different
            pipeline stages get different values, which do not depend on the number of stages.
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
    """Start and end of each block of rows of a full tensor. A last block that is too small joins the one before."""
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
    """Copies the entries that belong to the part of `rank` out of a block that starts at row `start` of the full
    tensor.
    """
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
