"""Values: what a tensor of a forward is for its loss, such as entries of samples or a sum over them; along which
dimension its samples lie, and how views move it; and factors. Must not contain: which operator makes which value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def mixes(name: str) -> UnprovedError:
    """The error of an operator that computes with several samples together."""
    return UnprovedError(f"{name} computes with several samples together")


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


@dataclass(frozen=True, slots=True)
class Factor:
    """A number that is the same for all samples of a batch, as an expression.

    Attributes:
        kind: "one"; "times" and "over" of two factors; "number" with an index among the suspicious numbers; "known" for
            an operator on factors; "some" and "each", whether a mask is true in any or in all samples; "same" for a
            constant; or a kind that adds up over microbatches: "entries" with their number, "total" of a known node
            over a factor, "picked" by a mask, or "classes", labels that count.
        args: what the kind needs.
    """

    kind: str
    args: tuple[Any, ...] = ()

    @property
    def adds(self) -> bool:
        """True if the number of a batch is the sum of those of its microbatches."""
        return self.kind in ("entries", "total", "picked", "classes")


ONE = Factor("one")


def factors_in(value: object) -> Iterator[Factor]:
    """A factor and those in its arguments, those on which others depend first."""
    if isinstance(value, tuple):
        for each in value:
            yield from factors_in(each)
    elif isinstance(value, Factor):
        yield from factors_in(value.args)
        yield value


def changed(value: Any, change: Callable[[Factor], Factor]) -> Any:
    """A factor in which `change` took the place of each, after those in its arguments."""
    if isinstance(value, tuple):
        return tuple(changed(each, change) for each in value)
    return change(Factor(value.kind, changed(value.args, change))) if isinstance(value, Factor) else value


def times(one: Factor, other: Factor) -> Factor:
    """The product of two factors."""
    return other if one == ONE else one if other == ONE else Factor("times", (one, other))


def over(one: Factor, other: Factor) -> Factor:
    """The quotient of two factors."""
    return one if other == ONE else Factor("over", (one, other))


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a loss: a sum over samples times a factor or, if it does not add up, the same in each microbatch."""

    factor: Factor
    adds: bool = True


@dataclass(frozen=True, slots=True)
class Same:
    """The same for all microbatches. `varies` if its entries are not all alike, so that they could number samples."""

    varies: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Entries of which each belongs to a sample, times a factor."""

    axis: SampleAxis
    factor: Factor = ONE


@dataclass(frozen=True, slots=True)
class TermSum:
    """A sum of terms that depend on parameters."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A number, or a few, that depend on labels, masks and constants alone."""

    factor: Factor


Value = Same | Rows | TermSum | Known
Values = Mapping[TapeNode, Value]


def terms_of(value: Value) -> tuple[Term, ...]:
    """What a value adds to a sum."""
    if isinstance(value, TermSum):
        return value.terms
    if isinstance(value, Known):
        return (Term(value.factor, adds=False),)
    return (Term(ONE, adds=False),)


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
