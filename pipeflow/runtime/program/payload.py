"""Payloads: the tensors of each value that passes, as they lie in this rank's memory, and what a forward keeps for its
backward. Plain data that the operations of a compiled program share, filled and emptied as the step goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.work import Work

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge


class Metadata(NamedTuple):
    """What an activation looks like: the tree it is (None: a bare tensor), and per tensor its shape, its dtype and
    whether it wants a gradient.
    """

    spec: TreeSpec | None
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]

    @classmethod
    def of(cls, tensors: list[Tensor], spec: TreeSpec | None, grads: tuple[bool, ...]) -> Metadata:
        return cls(spec, tuple(tensor.shape for tensor in tensors), tuple(tensor.dtype for tensor in tensors), grads)

    def matches(self, tensors: list[Tensor], spec: TreeSpec | None, grads: tuple[bool, ...]) -> bool:
        """Whether an activation looks like this. Asked at every send, so it makes nothing."""
        if self.grads != grads or self.spec != spec:
            return False
        for tensor, shape, dtype in zip(tensors, self.shapes, self.dtypes, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                return False
        return True

    def empty(self, device: torch.device) -> list[Tensor]:
        """Memory for such an activation."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in pairs]


class Promise(NamedTuple):
    """What users say of all that passes between stages: one tensor of this shape and dtype, which wants a gradient if
    its dtype can have one. None as the first entry stands for the microbatch's size.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype

    @property
    def is_open(self) -> bool:
        """Whether it holds for microbatches of any size."""
        return self.shape[:1] == (None,)

    def of(self, size: int) -> Metadata:
        """What an activation of so many samples looks like."""
        shape = torch.Size([size if entry is None else entry for entry in self.shape])
        return Metadata(None, (shape,), (self.dtype,), (self.dtype.is_floating_point or self.dtype.is_complex,))


class Payload:
    """The tensors of one value in this rank's memory, and their transfers under way. An activation also has its `spec`
    (None for a bare tensor) and tells which of its tensors want a gradient.
    """

    __slots__ = ("grads", "spec", "tensors", "works")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.works: list[Work] = []
        self.spec: TreeSpec | None = None
        self.grads: tuple[bool, ...] = ()


class BackwardState:
    """What a forward keeps for its backward: the leaves it started from and the gradient edges it ended in, not its
    output, whose memory goes once it is sent. And what an input-gradient half keeps for its weight-gradient half: the
    products that are still to be added to the weights' gradients.
    """

    __slots__ = ("deferred", "edges", "leaves")

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.edges: list[GradientEdge] = []
        self.deferred: list[Callable[[], None]] = []


def flatten(output: object, device: torch.device) -> tuple[list[Tensor], TreeSpec | None]:
    """The output of a stage on `device` as tensors, of any shapes, and the tree they came from; None for a bare tensor.
    Raises UsageError for anything but tensors that can be sent.
    """
    if isinstance(output, Tensor):
        _require_plain(output, device)
        return [output], None
    leaves, spec = tree_flatten(output)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise UsageError(f"a stage must return a tensor or a tree of tensors, got a {type(leaf).__name__} in it")
        _require_plain(leaf, device)
    return leaves, spec


def _require_plain(tensor: Tensor, device: torch.device) -> None:
    if tensor.is_nested:
        raise UsageError("a stage returned a nested tensor, which cannot be sent: return its values and lengths")
    if tensor.is_meta and device.type != "meta":  # gloo would end the process
        raise UsageError(
            f"a stage returned a tensor on the meta device, which has no memory to send: make it on {device}"
        )
