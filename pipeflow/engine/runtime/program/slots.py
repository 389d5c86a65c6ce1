"""Slots: the place of each value in this rank's memory, which the operations of a compiled program share, and fill and
empty during a step; what describes an activation; and copies of tensors whose memory may be overwritten before they
are read. Must not contain: computations and transfers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.protocol import Connection, Work
from pipeflow.engine.torch_private.tensors import holders
from pipeflow.engine.torch_private.trees import TreeSpec, tree_flatten, tree_map


class Metadata(NamedTuple):
    """Describes an activation: its tree (None for a bare tensor), and for each tensor its shape, dtype and whether it
    requires a gradient.
    """

    spec: TreeSpec | None
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]

    @classmethod
    def of(cls, slot: Slot) -> Metadata:
        tensors = slot.tensors
        return cls(slot.spec, tuple(each.shape for each in tensors), tuple(each.dtype for each in tensors), slot.grads)

    def __str__(self) -> str:
        pairs = zip(self.shapes, self.dtypes, self.grads, strict=True)
        said = [f"a {dtype} of shape {tuple(shape)}{' with a gradient' * grad}" for shape, dtype, grad in pairs]
        return " and ".join(said) or "no tensor"

    def matches(self, slot: Slot, *, grads: bool) -> bool:
        """Returns True if the activation fits this description, of whether tensors require `grads` only if asked.
        Called for every send, so it allocates nothing.
        """
        if (grads and self.grads != slot.grads) or self.spec != slot.spec:
            return False
        for tensor, shape, dtype in zip(slot.tensors, self.shapes, self.dtypes, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                return False
        return True

    def empty(self, device: torch.device) -> list[Tensor]:
        """Allocates tensors for an activation of these shapes and dtypes."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in pairs]


class Promise(NamedTuple):
    """The user's promise about activations: each is one tensor of this shape and dtype, and requires a gradient if its
    dtype allows it. None as the first entry stands for the microbatch's size.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype

    @property
    def is_open(self) -> bool:
        """True if the promise holds for microbatches of any size."""
        return self.shape[:1] == (None,)

    def of(self, size: int) -> Metadata:
        """The metadata of an activation of `size` samples."""
        shape = torch.Size([size if entry is None else entry for entry in self.shape])
        return Metadata(None, (shape,), (self.dtype,), (self.dtype.is_floating_point or self.dtype.is_complex,))


class Slot:
    """The place of one value in this rank's memory: its tensors, and their transfers under way. For an activation,
    `spec` is its tree (None for a bare tensor) and `grads` says which tensors require a gradient.
    """

    __slots__ = ("grads", "spec", "tensors", "works")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.works: list[Work] = []
        self.spec: TreeSpec | None = None
        self.grads: tuple[bool, ...] = ()

    def take(self) -> list[Tensor]:
        """The tensors, which leave the slot."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def done(self, link: Connection) -> None:
        """Waits until the transfers are done."""
        link.wait(self.works)
        self.works = []


def flatten(output: object, device: torch.device) -> tuple[list[Tensor], TreeSpec | None]:
    """A stage's output as a list of tensors and its tree, which is None for a bare tensor. Raises UsageError unless all
    leaves are tensors that can be sent from `device`.
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
