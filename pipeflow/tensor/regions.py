"""Regions: Megatron's mappings between whole and split tensors, each with the collective that its gradient needs. A
region is a part of the model in which a dimension is split over the tensor ranks. In a tensor region it is the hidden
dimension (the last one). In a sequence region it is the sequence (dimension 1 of batch, sequence, hidden).

With a group of one rank every mapping returns its input. Source: Shoeybi et al., arXiv 1909.08053, section 3 (f and g);
Korthikanti et al., arXiv 2205.05198, section 4.2.2 (their sequence-parallel forms).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.group import Group
from pipeflow.tensor.exchange import gathered, piece, sum_scattered, summed

Exchange = Callable[[Group, Tensor], Tensor]
SEQUENCE = 1  # the dimension

_gathered_last, _piece_last = partial(gathered, dim=-1), partial(piece, dim=-1)
_sum_scattered_last = partial(sum_scattered, dim=-1)
_gathered_sequence, _piece_sequence = partial(gathered, dim=SEQUENCE), partial(piece, dim=SEQUENCE)
_sum_scattered_sequence = partial(sum_scattered, dim=SEQUENCE)


def copy_to_tensor_region(input: Tensor, group: Group) -> Tensor:
    """Returns the input, which is the same on every rank; gradients are summed over the ranks."""
    return _exchanged(input, group, _same, summed)


def reduce_from_tensor_region(input: Tensor, group: Group) -> Tensor:
    """Sums the input over the ranks; the gradient, which is the same on every rank, is passed on."""
    return _exchanged(input, group, summed, _same)


def scatter_to_tensor_region(input: Tensor, group: Group) -> Tensor:
    """This rank's piece, along the last dimension, of an input that is equal on all ranks; gradients are gathered."""
    return _exchanged(input, group, _piece_last, _gathered_last)


def gather_from_tensor_region(input: Tensor, group: Group) -> Tensor:
    """Concatenates every rank's input along the last dimension. Each rank takes its piece of the gradient, which must
    be the same on every rank.
    """
    return _exchanged(input, group, _gathered_last, _piece_last)


def share_in_tensor_region(input: Tensor, ranks: int, group: Group) -> Tensor:
    """Concatenates, along the last dimension, the inputs of each `ranks` consecutive ranks, which hold pieces of one
    tensor. The gradient is summed over these ranks, and each takes its piece.
    """
    everything = _exchanged(input, group, _gathered_last, _sum_scattered_last)
    length = input.shape[-1] * ranks
    return everything.narrow(-1, group.rank // ranks * length, length)


def scatter_to_sequence_region(input: Tensor, group: Group) -> Tensor:
    """This rank's piece of the sequence of an input that is the same on every rank; gradients are gathered.

    Raises UsageError if the input has fewer than 3 dimensions, or the sequence cannot be split evenly.
    """
    return _exchanged(_require_sequence(input), group, _piece_sequence, _gathered_sequence)


def gather_from_sequence_region(input: Tensor, group: Group) -> Tensor:
    """Gathers the whole sequence for a computation that is the same on every rank; each rank takes its piece of the
    gradient. Raises UsageError if the input has fewer than 3 dimensions.
    """
    return _exchanged(_require_sequence(input), group, _gathered_sequence, _piece_sequence)


def gather_to_tensor_region(input: Tensor, group: Group) -> Tensor:
    """Gathers the whole sequence for a computation of which each rank does a part; gradients are summed over the ranks,
    and each takes its piece. Raises UsageError if the input has fewer than 3 dimensions.
    """
    return _exchanged(_require_sequence(input), group, _gathered_sequence, _sum_scattered_sequence)


def reduce_scatter_to_sequence_region(input: Tensor, group: Group) -> Tensor:
    """Sums the input over the ranks and returns this rank's piece of the sequence; gradients are gathered.

    Raises UsageError like `scatter_to_sequence_region`.
    """
    return _exchanged(_require_sequence(input), group, _sum_scattered_sequence, _gathered_sequence)


def _exchanged(input: Tensor, group: Group, there: Exchange, back: Exchange) -> Tensor:
    if group.size == 1:
        return input
    output: Tensor = _Exchanged.apply(input, group, there, back)  # type: ignore[no-untyped-call]  # torch's
    return output


def _require_sequence(input: Tensor) -> Tensor:
    if input.dim() < 3:
        raise UsageError(f"a sequence region needs (batch, sequence, hidden), got a shape of {tuple(input.shape)}")
    return input


def _same(group: Group, tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


class _Exchanged(Function):
    """Applies `there` in the forward and `back` to the gradient. The backward is itself differentiable."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: Group, there: Exchange, back: Exchange) -> Tensor:
        ctx.exchange = group, there, back
        return there(group, input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group, there, back = ctx.exchange
        return _exchanged(gradient, group, back, there), None, None, None
