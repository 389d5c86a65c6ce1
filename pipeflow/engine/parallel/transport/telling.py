"""Telling: one rank sends a tree of tensors and plain values to other ranks, which do not know its structure
beforehand. Must not contain: agreements of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow.engine.parallel.transport.agreement import finish, start
from pipeflow.engine.parallel.transport.plain import pack, unpack
from pipeflow.engine.parallel.transport.protocol import Tag, Transport
from pipeflow.engine.torch_private.trees import tree_flatten, tree_map, tree_unflatten

_DOING = "waiting for values from another rank"


class TensorPlace(NamedTuple):
    """The place of a tensor in the tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def tell(transport: Transport, peers: Sequence[int], tree: object) -> None:
    """Sends `tree` to each of `peers`, which must call `hear`. Raises LinkError, and UsageError if a leaf is neither a
    tensor nor a plain value.
    """
    leaves, spec = tree_flatten(tree)
    tensors = [leaf.detach().cpu().contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
    marked = [TensorPlace(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    body = torch.frombuffer(bytearray(pack(tree_unflatten(marked, spec))), dtype=torch.uint8)
    parts = [torch.tensor([len(body)], device="cpu"), body, *(tensor for tensor in tensors if tensor.numel())]
    works = [start(transport, peer, Tag.CONTROL, part, sending=True) for peer in peers for part in parts]
    for work in works:
        finish(work, "sending values to other ranks")


def hear(transport: Transport, peer: int) -> Any:
    """Receives a tree from `peer`; its tensors are in CPU memory. Raises LinkError."""
    length = torch.empty(1, dtype=torch.int64, device="cpu")
    finish(start(transport, peer, Tag.CONTROL, length, sending=False), _DOING)
    body = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    finish(start(transport, peer, Tag.CONTROL, body, sending=False), _DOING)

    def made(leaf: object) -> object:
        if not isinstance(leaf, TensorPlace):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        if tensor.numel():
            finish(start(transport, peer, Tag.CONTROL, tensor, sending=False), _DOING)
        return tensor

    return tree_map(made, unpack(body.numpy().tobytes()), is_leaf=lambda each: isinstance(each, TensorPlace))
