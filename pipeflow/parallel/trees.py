"""Trees of tensors between ranks: the last stage's outputs to the other stages, and values between replicas. Must not
contain: how they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeflow.parallel.context import Context
from pipeflow.parallel.transport.agreement import all_gather_object, exchange
from pipeflow.parallel.transport.protocol import Tag

PADDING = -100
"""The value that pads sequences of different lengths, as in transformers."""


def shared_outputs(outputs: Any, context: Context) -> Any:
    """Sends outputs (tensors in tuples, lists and dicts) that one or two ranks of a pipeline have to all of its ranks.
    They call it together; ranks without outputs pass None.
    """
    transport = context.transport
    tensors: list[Tensor] = []

    def index(tensor: Tensor) -> int:
        tensors.append(tensor.contiguous())
        return len(tensors) - 1

    structure = None if outputs is None else tree_map_only(Tensor, index, outputs)
    mine = None if outputs is None else (structure, [(tensor.shape, tensor.dtype) for tensor in tensors])
    everyone: list[Any] = all_gather_object(transport, mine)
    source = next(rank for rank, told in enumerate(everyone) if told is not None)
    structure, looks = everyone[source]
    if transport.rank == source:
        for tensor in tensors:
            body = tensor.cpu()
            peers = [rank for rank, told in enumerate(everyone) if told is None]
            exchange(transport, Tag.CONTROL, dict.fromkeys(peers, body), {}, "sending the outputs")
    elif outputs is None:
        tensors = []
        for shape, dtype in looks:
            body = torch.empty(shape, dtype=dtype, device="cpu")
            exchange(transport, Tag.CONTROL, {}, {source: body}, "waiting for the outputs of the last stage")
            tensors.append(body.to(context.device))
    return tree_map_only(int, tensors.__getitem__, structure)


def gathered(tree: Any, context: Context) -> Any:
    """Concatenates the tensors in `tree` of all replicas along dim 0; scalars are stacked. All replicas call it
    together, with tensors whose shapes differ only in dim 0.
    """
    return _each(tree, lambda tensor: _gathered(tensor, context))


def padded(tree: Any, context: Context, dim: int, value: int = PADDING) -> Any:
    """Pads the tensors in `tree` along `dim` with `value` to the longest length among all replicas."""

    def pad(tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim:
            return tensor
        length = torch.tensor([tensor.shape[dim]], device=context.device)
        context.data.all_reduce_max(length).wait()
        missing = int(length) - tensor.shape[dim]
        if not missing:
            return tensor
        shape = [*tensor.shape]
        shape[dim] = missing
        return torch.cat([tensor, tensor.new_full(shape, value)], dim)

    return tree if context.data_size == 1 else _each(tree, pad)


def _gathered(tensor: Tensor, context: Context) -> Tensor:
    part = (tensor if tensor.dim() else tensor[None]).contiguous().to(context.device)
    size = context.data_size
    if size == 1:
        return part
    lengths = torch.zeros(size, dtype=torch.int64, device=context.device)
    context.data.all_gather(lengths, torch.tensor([len(part)], device=context.device)).wait()
    longest = int(lengths.max())
    own = part.new_zeros(longest, *part.shape[1:])
    own[: len(part)] = part
    whole = own.new_empty(size * longest, *part.shape[1:])
    context.data.all_gather(whole, own).wait()
    pieces = whole.view(size, longest, *part.shape[1:])
    return torch.cat([piece[:length] for piece, length in zip(pieces, lengths.tolist(), strict=True)])


def _each(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    assert all(isinstance(leaf, Tensor) for leaf in tree_leaves(tree)), "outputs are tensors"
    return tree_map_only(Tensor, function, tree)
