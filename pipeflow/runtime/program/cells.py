"""What a compiled program's operations share: a Cell per value that passes, a Saved per forward that a backward
will need, and the Results of the step. Plain data, filled and emptied as the step goes.
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


class Meta(NamedTuple):
    """What an activation looks like: the tree it is (None: a bare tensor), and per tensor its shape, its dtype and
    whether it wants a gradient.
    """

    spec: TreeSpec | None
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]

    @classmethod
    def known(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Meta:
        """Of one tensor that the user described; it wants a gradient if its dtype can have one."""
        return cls(None, (torch.Size(shape),), (dtype,), (dtype.is_floating_point or dtype.is_complex,))

    @classmethod
    def of(cls, tensors: list[Tensor], spec: TreeSpec | None, grads: tuple[bool, ...]) -> Meta:
        return cls(spec, tuple(tensor.shape for tensor in tensors), tuple(tensor.dtype for tensor in tensors), grads)

    def describes(self, tensors: list[Tensor], spec: TreeSpec | None, grads: tuple[bool, ...]) -> bool:
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


class Cell:
    """One value of the plan in this rank's memory. An activation also has its `spec` (None for a bare tensor) and
    tells which of its tensors want a gradient.
    """

    __slots__ = ("grads", "spec", "tensors", "works")

    def __init__(self, grads: tuple[bool, ...] = ()) -> None:
        self.tensors: list[Tensor] = []
        self.works: list[Work] = []
        self.spec: TreeSpec | None = None
        self.grads = grads


class Saved:
    """What a forward keeps for its backward: the leaves it started from and the gradient edges it ended in, not its
    output, whose memory goes once it is sent. And what an input-gradient half keeps for its weight-gradient half: the
    products that are still to be added to the weights' gradients.
    """

    __slots__ = ("deferred", "edges", "leaves")

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.edges: list[GradientEdge] = []
        self.deferred: list[Callable[[], None]] = []


class Results:
    """What the last stage needs of the batch and makes of it: per microbatch its loss, and its output if asked."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.clear()

    def clear(self) -> None:
        """Lets go of the last step's batch, losses and outputs."""
        self.criterion: Callable[..., Tensor] | None = None
        self.labels: list[object] = []
        self.weights: list[float] = []  # of the microbatches; they add up to 1
        self.weight = 0.0  # of the batch
        self.gradient_scale = 1.0  # what the loss is multiplied by where its gradient starts
        self.keep_outputs = False
        self.losses: list[Tensor | None] = [None] * self.microbatches
        self.outputs: list[object] = [None] * self.microbatches

    def loss(self) -> Tensor | None:
        """The batch's mean loss, summed in microbatch order whatever the schedule; None where there is none."""
        parts = self.parts()
        return torch.stack(list(parts.values())).sum() if parts else None

    def parts(self) -> dict[int, Tensor]:
        """Per microbatch whose loss is known here, its part of the mean loss, in microbatch order. What weighs nothing
        adds nothing, even where its loss is no number, like the mean over no tokens.
        """
        weighted = enumerate(zip(self.losses, self.weights, strict=False))
        return {
            microbatch: _wide(loss) * weight if weight else torch.zeros_like(_wide(loss))
            for microbatch, (loss, weight) in weighted
            if loss is not None
        }


def _wide(loss: Tensor) -> Tensor:
    """In float32 at least, in which those of many microbatches can be added up."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def flatten(output: object, device: torch.device) -> tuple[list[Tensor], TreeSpec | None]:
    """The output of a stage on `device` as tensors and the tree they came from. Raises UsageError for anything but
    tensors that can be sent.
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
