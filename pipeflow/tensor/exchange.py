"""Collectives of a group along any dimension, started and finished apart. Tensors only: no autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.group import Group

Finish = Callable[[], Tensor]
"""Waits for a collective under way, and gives its result."""


def start_sum(group: Group, tensor: Tensor) -> Finish:
    """Starts to compute the sum over the ranks of `tensor`, which is the caller's own and is written to."""
    total = _plain(tensor)
    work = group.all_reduce(_numbers(total))

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


def start_gather(group: Group, part: Tensor, dim: int) -> Finish:
    """Starts to collect every rank's `part`, one after the other along `dim`."""
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
    """Starts to compute this rank's piece, along `dim`, of the sum over the ranks of `whole`. Raises UsageError when
    it has no equal pieces.
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
    """The sum over the ranks, in a tensor of its own."""
    return start_sum(group, tensor.clone(memory_format=torch.contiguous_format))()


def gathered(group: Group, part: Tensor, dim: int) -> Tensor:
    """Every rank's `part`, one after the other along `dim`."""
    return start_gather(group, part, dim)()


def sum_scattered(group: Group, whole: Tensor, dim: int) -> Tensor:
    """This rank's piece, along `dim`, of the sum over the ranks."""
    return start_sum_scatter(group, whole, dim)()


def piece(group: Group, whole: Tensor, dim: int) -> Tensor:
    """A copy of this rank's piece, along `dim`, of what all ranks have. Raises UsageError for no equal pieces."""
    length = piece_length(whole, dim, group.size)
    return whole.narrow(dim, group.rank * length, length).clone(memory_format=torch.contiguous_format)


def piece_length(whole: Tensor, dim: int, pieces: int) -> int:
    """The length of each of equal pieces along `dim`. Raises UsageError where they are not."""
    length = whole.shape[dim]
    if length % pieces:
        raise UsageError(
            f"a tensor of shape {tuple(whole.shape)} has no equal pieces along dimension {dim % whole.dim()} for "
            f"{pieces} tensor ranks: pad its {length} entries to a multiple of {pieces}"
        )
    return length // pieces


def _plain(tensor: Tensor) -> Tensor:
    """The tensor contiguous, with no conjugate or sign left to apply: it is sent as it lies in memory."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def _numbers(tensor: Tensor) -> Tensor:
    """The same memory as real numbers, which every backend can exchange."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
