"""Snapshots: tensors whose memory may be overwritten before they are read. Must not contain: when they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeflow.engine.torch_private.tensors import holders
from pipeflow.engine.torch_private.trees import tree_map


def snapshot(tree: object) -> object:
    """The same tree with detached tensors, which are copied if they may be overwritten later."""
    return tree_map(lambda leaf: _snapshot(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _snapshot(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if may_be_overwritten(tensor) else tensor.detach()


def may_be_overwritten(tensor: Tensor) -> bool:
    """Returns True if the tensor's memory may be overwritten after a stage has returned it, as in a static buffer. This
    may happen if it was written in place before, or if it belongs to no graph and another object holds its memory, too.
    """
    if tensor.is_inference() or tensor._version:
        return True
    return tensor.grad_fn is None and tensor.layout is torch.strided and holders(tensor) > 1
