"""Collectives of a group along any dimension, started and finished separately; and as functions with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.protocol import Group

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


def start_all_to_all(group: Group, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Finish:
    """Starts to send `rows`, the first `send_counts[0]` to rank 0, the next `send_counts[1]` to rank 1, and so on. The
    result has the rows that come from rank 0, which are `receive_counts[0]`, then those from rank 1, and so on.

    Raises UsageError for counts that are not one per rank, and for `send_counts` that do not add up to all rows.
    """
    if not (len(send_counts) == len(receive_counts) == group.size and sum(send_counts) == len(rows)):
        raise UsageError(
            f"send_counts and receive_counts need a number for each of {group.size} ranks, and those of send_counts "
            f"add up to the {len(rows)} rows, got {list(send_counts)} and {list(receive_counts)}"
        )
    rows = _plain(rows)
    received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
    work = group.all_to_all(_numbers(received), _numbers(rows), receive_counts, send_counts)

    def finish() -> Tensor:
        work.wait()
        return received

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


Exchange = Callable[[Group, Tensor], Tensor]
SEQUENCE = 1  # the dimension

_gathered_last, _piece_last = partial(gathered, dim=-1), partial(piece, dim=-1)
_sum_scattered_last = partial(sum_scattered, dim=-1)
_gathered_sequence, _piece_sequence = partial(gathered, dim=SEQUENCE), partial(piece, dim=SEQUENCE)
_sum_scattered_sequence = partial(sum_scattered, dim=SEQUENCE)


def copy_to_tensor_region(input: Tensor, group: Group) -> Tensor:
    """Returns the input, which is the same on every rank; gradients are summed over the ranks."""
    return exchanged(input, group, _same, summed)


def reduce_from_tensor_region(input: Tensor, group: Group) -> Tensor:
    """Sums the input over the ranks; the gradient, which is the same on every rank, is passed on."""
    return exchanged(input, group, summed, _same)


def scatter_to_tensor_region(input: Tensor, group: Group) -> Tensor:
    """This rank's piece, along the last dimension, of an input that is equal on all ranks; gradients are gathered."""
    return exchanged(input, group, _piece_last, _gathered_last)


def gather_from_tensor_region(input: Tensor, group: Group) -> Tensor:
    """Concatenates every rank's input along the last dimension. Each rank takes its piece of the gradient, which must
    be the same on every rank.
    """
    return exchanged(input, group, _gathered_last, _piece_last)


def share_in_tensor_region(input: Tensor, ranks: int, group: Group) -> Tensor:
    """Concatenates, along the last dimension, the inputs of each `ranks` consecutive ranks, which hold pieces of one
    tensor. The gradient is summed over these ranks, and each takes its piece.
    """
    everything = exchanged(input, group, _gathered_last, _sum_scattered_last)
    length = input.shape[-1] * ranks
    return everything.narrow(-1, group.rank // ranks * length, length)


def scatter_to_sequence_region(input: Tensor, group: Group) -> Tensor:
    """This rank's piece of the sequence of an input that is the same on every rank; gradients are gathered.

    Raises UsageError if the input has fewer than 3 dimensions, or the sequence cannot be split evenly.
    """
    return exchanged(_require_sequence(input), group, _piece_sequence, _gathered_sequence)


def gather_from_sequence_region(input: Tensor, group: Group) -> Tensor:
    """Gathers the whole sequence for a computation that is the same on every rank; each rank takes its piece of the
    gradient. Raises UsageError if the input has fewer than 3 dimensions.
    """
    return exchanged(_require_sequence(input), group, _gathered_sequence, _piece_sequence)


def gather_to_tensor_region(input: Tensor, group: Group) -> Tensor:
    """Gathers the whole sequence for a computation of which each rank does a part; gradients are summed over the ranks,
    and each takes its piece. Raises UsageError if the input has fewer than 3 dimensions.
    """
    return exchanged(_require_sequence(input), group, _gathered_sequence, _sum_scattered_sequence)


def reduce_scatter_to_sequence_region(input: Tensor, group: Group) -> Tensor:
    """Sums the input over the ranks and returns this rank's piece of the sequence; gradients are gathered.

    Raises UsageError like `scatter_to_sequence_region`.
    """
    return exchanged(_require_sequence(input), group, _sum_scattered_sequence, _gathered_sequence)


def exchanged(input: Tensor, group: Group, there: Exchange, back: Exchange) -> Tensor:
    """Returns `there(group, input)`, whose gradient is `back(group, gradient)`; of one rank, the input itself."""
    if group.size == 1:
        return input
    output: Tensor = _Exchanged.apply(input, group, there, back)  # type: ignore[no-untyped-call]  # torch's
    return output


def _waited(finish: Finish) -> Tensor:
    return finish()


def all_to_all(
    input: Tensor,
    group: Group,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    wait: Callable[[Finish], Tensor] = _waited,
) -> Tensor:
    """Exchanges rows, along the first dimension: `send_counts[i]` of the input's rows, in order, go to rank i of the
    group, and `receive_counts[i]` of the output's rows come from it. Gradients go back the same way. Each rank's
    `receive_counts` must be what the others send to it. `wait` gets the function that waits for the rows.

    Raises UsageError for counts that are not one per rank, and for `send_counts` that do not add up to all rows.
    """
    return exchanged(
        input,
        group,
        partial(_all_to_all, counts=(send_counts, receive_counts), wait=wait),
        partial(_all_to_all, counts=(receive_counts, send_counts), wait=wait),
    )


def _all_to_all(
    group: Group, rows: Tensor, counts: tuple[Sequence[int], Sequence[int]], wait: Callable[[Finish], Tensor]
) -> Tensor:
    return wait(start_all_to_all(group, rows, *counts))


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
        return exchanged(gradient, group, back, there), None, None, None
