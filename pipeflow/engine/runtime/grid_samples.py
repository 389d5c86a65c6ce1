"""Samples in a grid of tensor ranks: which of a batch this rank computes, their outputs, and what cannot be computed on
a grid. Must not contain: layers, and how losses of parts are weighed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.sharding import Divided
from pipeflow.engine.parallel.transport.agreement import gather_rows
from pipeflow.engine.runtime.microbatch import Along, Batch, Whole, even_sizes
from pipeflow.engine.runtime.original import root_of
from pipeflow.engine.torch_private.trees import tree_map


class GridSamples:
    """Takes the samples of one part out of batches, which every rank reads whole. The ranks of one part have the same
    samples, and other features of their activations.

    Args:
        context: the context of this rank, with several parts of samples.
    """

    def __init__(self, context: Context) -> None:
        self._context, layout = context, context.layout
        self._part, self._parts, self._mode = layout.sample_part(context.rank), layout.sample_parts, layout.tensor_mode
        self._repeats = False  # whether the last batch was computed whole by each part
        self._samples = 0  # of the last batch, in each part

    def own(self, batch: Batch, *, training: bool) -> Batch:
        """The part of `batch` that has this rank's samples. A batch of an evaluation that has no equal parts is
        computed whole by each part. Raises UsageError for another batch without equal parts.
        """
        if batch.is_divided:
            raise UsageError(
                f"tensor mode {self._mode!r} needs a batch that is not divided: pass the whole batch, or launch with "
                "tensor_mode='1d'"
            )
        each, left = divmod(batch.samples, self._parts)
        self._repeats, self._samples = bool(left), each
        if left and training:
            raise UsageError(
                f"a batch of {batch.samples} samples has no {self._parts} equal parts for tensor mode {self._mode!r}: "
                f"use a multiple of {self._parts}, and leave the rest out, as with DataLoader(..., drop_last=True)"
            )
        if left:
            return replace(batch, repeats=self._parts)

        def part(leaf: Any) -> Any:
            if isinstance(leaf, Along):
                parts = tree_map(lambda value: _chunk(value, self._part, each, leaf.dim), leaf.value)
                return Along(parts, leaf.dim)
            return leaf if isinstance(leaf, Whole) else _chunk(leaf, self._part, each, 0)

        inputs, labels = (
            tree_map(part, tree, is_leaf=lambda leaf: isinstance(leaf, Along | Whole))
            for tree in (batch.inputs, batch.labels)
        )
        sizes = even_sizes(each, len(batch.sizes))
        return replace(batch, inputs=inputs, labels=labels, sizes=sizes, leaves=[], whole=batch)

    def whole(self, outputs: object) -> object:
        """The outputs of all samples of the last batch, in its order, from those of this rank's samples.

        Raises UsageError for an output that has no entry for each sample along dimension 0.
        """
        grid = self._context.grid
        if self._repeats or grid is None:
            return outputs
        lines = [*(grid.along[axis] for axis in reversed(grid.grid.sample_axes)), self._context.depth]

        def gathered(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            if len(leaf) != self._samples:
                raise UsageError(
                    f"an output has shape {tuple(leaf.shape)} for the {self._samples} samples of a rank, which tensor "
                    f"mode {self._mode!r} joins along dimension 0: return samples there, or leave return_outputs out"
                )
            for group in lines:
                if group.size > 1:
                    leaf = torch.cat(gather_rows(group, leaf.detach().contiguous()))
            return leaf

        return tree_map(gathered, outputs)


def _chunk(leaf: Any, part: int, size: int, dim: int) -> Any:
    return leaf.narrow(dim, part * size, size) if isinstance(leaf, Tensor) and leaf.dim() else leaf


def tile_shape(shape: Sequence[int | None] | None, layout: WorldLayout) -> Sequence[int | None] | None:
    """The shape of this rank's tile of activations of `shape`, whose first entry may be None. Raises UsageError if a
    grid cannot divide it.
    """
    if shape is None or layout.grid is None:
        return shape
    (first, *between), last, side, parts = shape[:-1], shape[-1], layout.grid.side, layout.sample_parts
    if last is None or last % side or (first is not None and first % parts):
        raise UsageError(
            f"tensor_shape={tuple(shape)} has no equal tiles for tensor mode {layout.tensor_mode!r}: its first entry "
            f"must be None or a multiple of {parts}, its last one a multiple of {side}"
        )
    return (None if first is None else first // parts, *between, last // side)


def require_known(layout: WorldLayout, **given: object) -> None:
    """Raises UsageError for an argument of the Pipeline, `given` by name, that is not known to work on a grid."""
    for name in (name for name, value in given.items() if value and layout.sample_parts > 1):
        raise UsageError(
            f"tensor mode {layout.tensor_mode!r} does not go together with {name}=: leave it out, or launch with "
            "tensor_mode='1d'"
        )


def require_stages(chunks: Iterable[nn.Module], layout: WorldLayout) -> None:
    """Raises UsageError for a stage that is not known to compute on a grid: it must say `fits_grids`, and a layer of
    `pipeflow.tensor` must hold each of its parameters.
    """
    mode = layout.tensor_mode
    for root in map(root_of, chunks):
        if not getattr(root, "fits_grids", False):
            raise UsageError(
                f"tensor mode {mode!r} divides samples and features of all activations, and {type(root).__name__} is "
                "not known to compute so: use a GPTStage, set fits_grids = True in a class made of pipeflow.tensor's "
                "layers, or launch with tensor_mode='1d'"
            )
        for name, layer in root.named_modules():
            if next(layer.parameters(recurse=False), None) is not None and not _knows_grid(root, name):
                raise UsageError(
                    f"{name or 'the stage'}, a {type(layer).__name__}, has no form in tensor mode {mode!r}: use a "
                    "layer of pipeflow.tensor, or launch with tensor_mode='1d'"
                )


def _knows_grid(root: nn.Module, name: str) -> bool:
    """Whether the module of this name, or one around it, is a layer that computes on a grid."""
    parts = name.split(".")
    around = (root.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1))
    return any(isinstance(layer, Divided) and getattr(layer, "grid", None) is not None for layer in around)
