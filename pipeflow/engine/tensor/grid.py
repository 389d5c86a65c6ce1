"""What layers compute on a grid of tensor ranks. A table says for each mode and layer which axes divide the weight, and
which axis gathers the input, gathers the weight and reduces the output. All modes share one product.

Sources: SUMMA in 2D, arXiv 2104.05343, sections 2 and 3; 2.5D, arXiv 2105.14500, whose squares are this grid of two
axes; 3D, arXiv 2105.14450, section 3. Must not contain: the layers' parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.layers import lowered
from pipeflow.engine.deferral.products import Copies
from pipeflow.engine.parallel.grid import Grid, GridGroups
from pipeflow.engine.parallel.sharding import Split
from pipeflow.engine.tensor.regions import (
    exchanged,
    gathered,
    start_gather,
    start_sum,
    start_sum_scatter,
    sum_scattered,
)

SAMPLES, FEATURES = 0, -1  # the dimensions of an activation that a grid divides
OUT, IN = 0, 1  # the dimensions of a weight


class Turn(NamedTuple):
    """A collective along an axis of the grid, of pieces along a dimension; without one, of whole tensors."""

    axis: int
    dim: int | None


class Product(NamedTuple):
    """How a grid computes `input @ weight.T`.

    Attributes:
        out: the axes that divide the weight's outputs, the outermost first.
        inner: the axes that divide the weight's inputs.
        of_input: the axis along which inputs are gathered; None if each rank computes with its own.
        of_weight: the axes along which the weight is gathered, from the innermost on.
        of_output: the axis along which products are summed, of which each rank keeps a piece, or all without a dim.
        features: the axis that divides the features of the output; None if each rank has all.
    """

    out: tuple[int, ...]
    inner: tuple[int, ...]
    of_input: Turn | None
    of_weight: tuple[Turn, ...]
    of_output: Turn | None
    features: int | None


SQUARE = Product((1,), (0,), Turn(1, FEATURES), (Turn(0, IN),), None, 1)
"""C = A B of SUMMA. A rank gathers the pieces of r broadcasts at once, so it receives as many bytes."""

PRODUCTS = {
    (2, "column"): SQUARE,
    (2, "row"): SQUARE,
    (3, "column"): Product((2, 0), (1,), Turn(2, SAMPLES), (Turn(0, OUT),), Turn(1, SAMPLES), 2),
    (3, "row"): Product((1, 0), (2,), Turn(1, SAMPLES), (Turn(0, OUT),), Turn(2, SAMPLES), 1),
    # the last layers of a model leave samples where they are; C = A B^T of SUMMA
    (2, "vocabulary"): Product((0,), (1,), None, (Turn(0, OUT),), Turn(1, FEATURES), 1),
    (3, "vocabulary"): Product((0, 2), (1,), None, (Turn(2, OUT), Turn(0, OUT)), Turn(1, FEATURES), 1),
    (2, "classes"): Product((), (1, 0), None, (Turn(0, IN),), Turn(1, None), None),
    (3, "classes"): Product((), (1, 0, 2), None, (Turn(2, IN), Turn(0, IN)), Turn(1, None), None),
}
"""The products by the number of axes and the kind of layer. In a cube, a column-parallel layer swaps axes 1 and 2 of
its input, and a row-parallel one swaps them back.
"""


@cache
def split_over(grid: Grid, sizes: tuple[int, ...], axes: tuple[tuple[int, ...], ...]) -> Split:
    """The split of a parameter of `sizes`, of which dimension i is divided over `axes[i]`, the outermost first."""
    found: Split | None = None
    for dim in reversed(range(len(sizes))):
        if axes[dim]:
            found = Split(dim, sizes[dim], places=grid.places(axes[dim]), then=found)
    assert found is not None
    return found


def require_ungathered(layer: str, groups: GridGroups | None, **options: bool) -> None:
    """Raises UsageError for options of a layer that have no form in a grid."""
    for name, given in options.items():
        if groups is not None and given:
            raise UsageError(
                f"{layer} has no {name} on a grid of tensor ranks, which divides activations anyway: leave it out, or "
                "launch with tensor_mode='1d'"
            )


class TileProduct(NamedTuple):
    """A linear layer on a grid, as one rank computes it. The rank keeps its tiles of input and weight for the
    backward, which gathers them again.

    With B S rows, K inputs and N outputs, a rank receives in a forward these numbers of elements. In a square
    (r - 1) / r x (B S K / r + K N / r), and B S N in place of B S K for "vocabulary". In a cube
    (r - 1) / r^3 x (B S K + K N + B S N), for "vocabulary" without B S K and with r + 1 times K N. A backward receives
    as many of the output, and twice as many of input and weight.
    """

    groups: GridGroups
    product: Product

    @property
    def parts(self) -> tuple[int, int]:
        """The numbers of parts into which the outputs and the inputs of the weight are divided."""
        side = self.groups.grid.side
        return side ** len(self.product.out), side ** len(self.product.inner)

    def split(self, out_features: int, in_features: int) -> Split:
        """How the weight is split."""
        return split_over(self.groups.grid, (out_features, in_features), (self.product.out, self.product.inner))

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None, copies: Copies | None = None) -> Tensor:
        """This rank's tile of the output, from its tiles of input and weight, and from the whole bias.

        Raises UsageError for numbers of samples that a cube cannot divide.
        """
        output: Tensor = _Product.apply(weight, input, self.groups, self.product, copies)  # type: ignore[no-untyped-call]  # torch's
        if bias is None:
            return output
        if (axis := self.product.features) is None:  # of the ranks that have this output, one counts the gradient
            return output + (bias if self.groups.features.rank == 0 else bias.detach() + 0 * bias)
        padding = output.shape[-1] * self.groups.along[axis].size - len(bias)
        return output + own_features(self.groups, functional.pad(bias, (0, padding)), axis)


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, input: Tensor, groups: GridGroups, product: Product, copies: Copies | None
    ) -> Tensor:
        input, weight, _ = lowered(input, weight, None, copies)
        ctx.save_for_backward(input, weight)
        ctx.of = groups, product
        whole_input, whole_weight = _gathered(groups, product, input, weight)
        made = functional.linear(whole_input, whole_weight)
        if (turn := product.of_output) is None:
            return made
        group = groups.along[turn.axis]
        return start_sum(group, made)() if turn.dim is None else sum_scattered(group, made, turn.dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError("a backward with create_graph=True cannot run through a linear layer of a grid")
        input, weight = ctx.saved_tensors
        groups, product = ctx.of
        if (turn := product.of_output) is not None and turn.dim is not None:
            gradient = gathered(groups.along[turn.axis], gradient, turn.dim)
        whole_input, whole_weight = _gathered(groups, product, input, weight)
        rows = gradient.reshape(-1, gradient.shape[-1])
        wants_weight, wants_input = ctx.needs_input_grad[:2]
        finish_input = finish_weight = None
        if wants_input:
            of_input = rows.mm(whole_weight.conj()).view(whole_input.shape)
            finish_input = _sum_started(groups, product.of_input, of_input)
        if wants_weight:
            of_weight = rows.t().mm(whole_input.reshape(rows.shape[0], -1).conj())
            for turn in reversed(product.of_weight):
                finish_weight = _sum_started(groups, turn, of_weight)
                of_weight = finish_weight()
        return of_weight if wants_weight else None, finish_input() if finish_input else None, None, None, None


def _gathered(groups: GridGroups, product: Product, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Input and weight, gathered along the axes of the product."""
    turn = product.of_input
    finish = None if turn is None else start_gather(groups.along[turn.axis], input, _dim(turn))
    for each in product.of_weight:
        weight = gathered(groups.along[each.axis], weight, _dim(each))
    return input if finish is None else finish(), weight


def _sum_started(groups: GridGroups, turn: Turn | None, tensor: Tensor) -> Any:
    return (lambda: tensor) if turn is None else start_sum_scatter(groups.along[turn.axis], tensor, _dim(turn))


def _dim(turn: Turn) -> int:
    assert turn.dim is not None
    return turn.dim


def own_features(groups: GridGroups, whole: Tensor, axis: int = Grid.FEATURES, dim: int = -1) -> Tensor:
    """This rank's features, along `dim`, of a tensor that every rank holds whole. Its gradient is a part of a sum over
    all tensor ranks.
    """
    group = groups.along[axis]
    return whole.chunk(group.size, dim)[group.rank]


def require_divisible(layer: str, groups: GridGroups, name: str, sizes: Sequence[int]) -> None:
    """Raises UsageError unless the grid divides the features of activations, of these `sizes`."""
    side = groups.grid.side
    if len(sizes) != 1 or sizes[0] % side:
        raise UsageError(
            f"{layer} cannot split {name}={'x'.join(map(str, sizes))} over the {side} ranks of a grid that divide "
            f"features: use one dimension, a multiple of {side}, or choose another tensor size"
        )


def grid_layer_norm(
    groups: GridGroups, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Layer norm over features that the grid divides, (..., features / r). Weight and bias are whole.

    Each rank gathers two numbers per token, the mean and the variance of each rank's features: their means, and the
    variance of the means, are those of all features. It computes in at least float32, as torch does.
    """
    precise = input if input.dtype is torch.float64 else input.float()
    own = torch.stack([precise.mean(-1), precise.var(-1, unbiased=False)])
    means, variances = exchanged(own[None], groups.features, _gathered_first, _scattered_first).unbind(1)
    mean = means.mean(0)
    variance = (variances + (means - mean).square()).mean(0)
    output = (precise - mean.unsqueeze(-1)) * (variance.unsqueeze(-1) + eps).rsqrt()
    if weight is not None:
        output = output * own_features(groups, weight)
    if bias is not None:
        output = output + own_features(groups, bias)
    return output.to(input.dtype)


def _gathered_first(group: Any, part: Tensor) -> Tensor:
    return gathered(group, part, 0)


def _scattered_first(group: Any, whole: Tensor) -> Tensor:
    return sum_scattered(group, whole, 0)


def gather_rows(groups: GridGroups, axes: Sequence[int], part: Tensor) -> Tensor:
    """The rows of all ranks along `axes`, of which the first is the outermost, also of numbers without gradients. The
    gradient of a rank's rows is the sum of those of all ranks.
    """
    for axis in reversed(axes):
        part = exchanged(part, groups.along[axis], _gathered_first, _scattered_first)
    return part


def scatter_rows(groups: GridGroups, axes: Sequence[int], whole: Tensor) -> Tensor:
    """This rank's rows of the sum over the ranks along `axes`, of which the first is the outermost."""
    for axis in axes:
        whole = exchanged(whole, groups.along[axis], _scattered_first, _gathered_first)
    return whole
