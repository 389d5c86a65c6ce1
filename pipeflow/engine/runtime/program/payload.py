"""Payloads: the tensors of each value in this rank's memory, and the state that a forward keeps for its backward. Plain
data that operations of a compiled program share, and fill and empty during a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.deferral.products import Products
from pipeflow.engine.parallel.transport.protocol import Work
from pipeflow.engine.runtime.program.unused import Unused
from pipeflow.engine.torch_private.autograd import run_backward
from pipeflow.engine.torch_private.trees import TreeSpec, tree_flatten

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge


class Metadata(NamedTuple):
    """Describes an activation: its tree (None for a bare tensor), and for each tensor its shape, dtype and whether it
    requires a gradient.
    """

    spec: TreeSpec | None
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]

    @classmethod
    def of(cls, tensors: list[Tensor], spec: TreeSpec | None, grads: tuple[bool, ...]) -> Metadata:
        return cls(spec, tuple(tensor.shape for tensor in tensors), tuple(tensor.dtype for tensor in tensors), grads)

    def matches(self, tensors: list[Tensor], spec: TreeSpec | None, grads: tuple[bool, ...]) -> bool:
        """Returns True if the activation fits this description. Called for every send, so it allocates nothing."""
        if self.grads != grads or self.spec != spec:
            return False
        for tensor, shape, dtype in zip(tensors, self.shapes, self.dtypes, strict=True):
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


class Payload:
    """The tensors of one value in this rank's memory, and their transfers under way. For an activation, `spec` is its
    tree (None for a bare tensor) and `grads` says which tensors require a gradient.
    """

    __slots__ = ("grads", "spec", "tensors", "works")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.works: list[Work] = []
        self.spec: TreeSpec | None = None
        self.grads: tuple[bool, ...] = ()


class BackwardState:
    """The state that a forward keeps for its backward, and I for W.

    A forward keeps the leaves of its graph and the gradient edges of its output, but not the output itself, whose
    memory is freed once it is sent. I keeps the products that are still to be added to the weights' gradients.
    """

    __slots__ = ("deferred", "edges", "leaves")

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.edges: list[GradientEdge] = []
        self.deferred: list[Products] = []

    def backward(self, gradients: list[Tensor]) -> None:
        """torch.autograd.backward without its checks of the arguments, which take as long as a small backward:
        gradients fit their edges, because each is made for its edge or received with the shape of what was sent.
        Nothing flows into edges whose gradient is `Unused`.
        """
        edges, self.edges = self.edges, []
        if Unused in map(type, gradients):
            used = [pair for pair in zip(edges, gradients, strict=True) if not isinstance(pair[1], Unused)]
            if not used:
                return
            edges, gradients = map(list, zip(*used, strict=True))
        options = {"keep_graph": False, "create_graph": False, "allow_unreachable": True, "accumulate_grad": True}
        run_backward(tuple(edges), tuple(gradients), inputs=(), **options)


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
