"""Collectives of a group along any dimension, started and finished separately. Must not contain: autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.group import Group

Finish = Callable[[], Tensor]
"""Waits for a collective under way and returns its result."""


def start_sum(group: Group, tensor: Tensor) -> Finish:
    """Starts the sum of `tensor` over the ranks. The tensor must belong to the caller; it may be overwritten."""
    total = _plain(tensor)
    work = group.all_reduce(_numbers(total))

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


def start_gather(group: Group, part: Tensor, dim: int) -> Finish:
    """Starts to concatenate every rank's `part` along `dim`."""
    dim %= part.dim()
    part = _plain(part)
    whole = part.new_empty(group.size, *part.shape)
    work = group.all_gather(_numbers(whole).view(-1), _numbers(part).view(-1))

    def finish() -> Tensor:
        work.wait()
        together: Tensor = whole.movedim(0, dim).flatten(dim, dim + 1)
        return together

    return finish


def start_sum_scatter(group: Group, whole: Tensor, dim: int) -> Finish:
    """Starts the sum of `whole` over the ranks, of which this rank gets its piece along `dim`. Raises UsageError if it
    cannot be split evenly.
    """
    dim %= whole.dim()
    length = piece_length(whole, dim, group.size)
    pieces = _plain(whole.unflatten(dim, (group.size, length)).movedim(dim, 0))
    piece = pieces.new_empty(pieces.shape[1:])
    work = group.reduce_scatter(_numbers(piece).view(-1), _numbers(pieces).view(-1))

    def finish() -> Tensor:
        work.wait()
        return piece

    return finish


def summed(group: Group, tensor: Tensor) -> Tensor:
    """The sum over the ranks, in a new tensor."""
    return start_sum(group, tensor.clone(memory_format=torch.contiguous_format))()


def gathered(group: Group, part: Tensor, dim: int) -> Tensor:
    """Every rank's `part`, concatenated along `dim`."""
    return start_gather(group, part, dim)()


def sum_scattered(group: Group, whole: Tensor, dim: int) -> Tensor:
    """This rank's piece, along `dim`, of the sum over the ranks."""
    return start_sum_scatter(group, whole, dim)()


def piece(group: Group, whole: Tensor, dim: int) -> Tensor:
    """A copy of this rank's piece of `whole` along `dim`. Raises UsageError if it cannot be split evenly."""
    length = piece_length(whole, dim, group.size)
    return whole.narrow(dim, group.rank * length, length).clone(memory_format=torch.contiguous_format)


def piece_length(whole: Tensor, dim: int, pieces: int) -> int:
    """The length of each of `pieces` equal pieces along `dim`. Raises UsageError if it cannot be split evenly."""
    length = whole.shape[dim]
    if length % pieces:
        raise UsageError(
            f"a tensor of shape {tuple(whole.shape)} has no equal pieces along dimension {dim % whole.dim()} for "
            f"{pieces} tensor ranks: pad its {length} entries to a multiple of {pieces}"
        )
    return length // pieces


def _plain(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and with conjugation and sign applied, because its memory is sent as it is."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def _numbers(tensor: Tensor) -> Tensor:
    """The same memory as real numbers, which every backend can exchange."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
