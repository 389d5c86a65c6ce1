"""Samples: along which dimension of a tensor its samples lie, and how operators move that dimension. Must not contain:
sums over samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pipeflow.engine.stages.tape import TapeNode


class UnprovedError(Exception):
    """It is not proved what a loss is divided by; the message says why.

    Attributes:
        depends: True if it may be proved for other values of the batch.
    """

    depends = False


class AmbiguousError(UnprovedError):
    """A number that the first microbatch did not tell from another is a different one in this batch."""


@dataclass(frozen=True, slots=True)
class SampleAxis:
    """The dimension of the samples. Its index counts `outer` blocks of all samples, each with `inner` entries.

    Attributes:
        dim: the dimension, from 0.
        picks: the masks or places that have picked entries of it; then `outer` and `inner` are 1.
        pairs: whether the first half of its entries may belong to the other half, as chosen texts to rejected ones:
            whoever divided the batch has kept pairs together.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    picks: tuple[TapeNode, ...] = ()
    pairs: bool = False

    def at(self, dim: int) -> SampleAxis:
        """The same axis as another dimension."""
        return replace(self, dim=dim)

    def alike(self, other: SampleAxis) -> bool:
        """Returns True if both dimensions, wherever they are, have the same entries."""
        return self.at(0) == other.at(0)


def mixes(name: str) -> UnprovedError:
    """The error of an operator that computes with several samples together."""
    return UnprovedError(f"{name} computes with several samples together")


def reshaped(axis: SampleAxis, old: Sequence[int], new: Sequence[int]) -> SampleAxis:
    """The axis after a view. Raises UnprovedError if no dimension is left that has all samples."""
    before, after = prod(old[: axis.dim]) * axis.outer, axis.inner * prod(old[axis.dim + 1 :])
    samples = old[axis.dim] // (axis.outer * axis.inner)
    for dim, size in enumerate(new):
        first, last = prod(new[:dim]), prod(new[dim + 1 :])
        if first and last and not before % first and not after % last:
            outer, inner = before // first, after // last
            if size == outer * samples * inner:
                return replace(axis, dim=dim, outer=outer, inner=inner)
    raise mixes("view")


def without(axis: SampleAxis, dims: Sequence[int], *, keepdim: bool) -> SampleAxis:
    """The axis after a reduction of other dimensions."""
    return axis if keepdim else axis.at(axis.dim - sum(dim < axis.dim for dim in dims))


def dims_of(node: TapeNode, name: str, of: TapeNode) -> list[int]:
    """The dimensions that an argument names; all if it names none."""
    given: Any = node.argument(name)
    count = max(len(of.shape), 1)
    if given is None or given == []:
        return list(range(len(of.shape)))
    return [dim % count for dim in (given if isinstance(given, list | tuple) else [given])]


def aligned(axes: Sequence[tuple[SampleAxis, TapeNode]], shape: Sequence[int], name: str) -> SampleAxis:
    """The axis of the result of a pointwise operator, of this shape, from those of its arguments. Raises UnprovedError
    if they differ.
    """
    moved = [axis.at(axis.dim + len(shape) - len(each.shape)) for axis, each in axes]
    if any(axis != moved[0] for axis in moved):
        raise mixes(name)
    axis, (its, first) = moved[0], axes[0]
    if shape[axis.dim] != first.shape[its.dim]:
        raise mixes(name)
    return axis


def viewed(axis: SampleAxis, node: TapeNode, of: TapeNode) -> SampleAxis:
    """The axis of a view of `of`, or of an operator that only moves entries."""
    match node.name:
        case "view" | "_unsafe_view" | "reshape" | "_reshape_alias" | "squeeze" | "unsqueeze" | "flatten" | "unflatten":
            return reshaped(axis, of.shape, node.shape)
        case "t":
            return axis.at(1 - axis.dim) if len(of.shape) == 2 else axis
        case "transpose":
            one, two = (node.argument(each) % len(of.shape) for each in ("dim0", "dim1"))
            return axis.at({one: two, two: one}.get(axis.dim, axis.dim))
        case "permute":
            return axis.at([dim % len(of.shape) for dim in node.argument("dims")].index(axis.dim))
        case "expand":
            dim = axis.dim + len(node.shape) - len(of.shape)
            if node.shape[dim] != of.shape[axis.dim]:
                raise mixes(node.name)
            return axis.at(dim)
        case "select" | "unbind":
            [dim] = dims_of(node, "dim", of) if node.argument("dim") is not None else [0]
            if dim == axis.dim:
                raise mixes("an index of one sample")
            return axis.at(axis.dim - (dim < axis.dim))
        case "constant_pad_nd" if any(node.argument("pad")[2 * (len(of.shape) - 1 - axis.dim) :][:2]):
            raise mixes(f"{node.name} along the samples")
        case "slice" | "constant_pad_nd" if node.shape[axis.dim] == of.shape[axis.dim]:
            return axis
        case "slice" if axis.pairs and 2 * node.shape[axis.dim] == of.shape[axis.dim]:
            return axis
        case "slice":
            raise mixes(f"{node.name} along the samples")
        case "split" | "split_with_sizes" | "flip" | "roll":
            return _parted(axis, node, of)
    return axis


def _parted(axis: SampleAxis, node: TapeNode, of: TapeNode) -> SampleAxis:
    """The axis after an operator along some dimensions."""
    if axis.dim not in dims_of(node, "dims" if node.name in ("flip", "roll") else "dim", of):
        return axis
    if node.name == "split" and axis.outer > 1 and node.argument("split_size") * axis.outer == of.shape[axis.dim]:
        return replace(axis, outer=1)
    if node.name == "split" and axis.pairs and node.argument("split_size") * 2 == of.shape[axis.dim]:
        return axis
    raise mixes(f"{node.name} along the samples")
