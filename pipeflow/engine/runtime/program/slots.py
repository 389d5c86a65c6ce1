"""Slots: the place of each value in this rank's memory, which the operations of a compiled program share, and fill and
empty during a step; what describes an activation; the gradient of a value that later stages did not use; and copies of
tensors whose memory may be overwritten before they are read. Must not contain: computations and transfers.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.protocol import Work
from pipeflow.engine.torch_private.tensors import holders, storage_key
from pipeflow.engine.torch_private.trees import TreeSpec, tree_flatten, tree_map

Form = tuple[torch.Size, torch.dtype]
"""The shape and dtype of a tensor."""


class Metadata(NamedTuple):
    """Describes an activation: its tree (None for a bare tensor), and for each tensor its form and whether it requires
    a gradient.
    """

    spec: TreeSpec | None
    forms: tuple[Form, ...]
    grads: tuple[bool, ...]

    @classmethod
    def of(cls, slot: Slot) -> Metadata:
        return cls(slot.spec, tuple((each.shape, each.dtype) for each in slot.tensors), slot.grads)

    def __str__(self) -> str:
        each = zip(self.forms, self.grads, strict=True)
        said = [f"a {dtype} of shape {tuple(shape)}{' with a gradient' * grad}" for (shape, dtype), grad in each]
        return (" and ".join(said) or "no tensor") + " in a tree" * (self.spec is not None)

    def matches(self, slot: Slot, *, grads: bool) -> bool:
        """Returns True if the activation fits this description, of whether tensors require `grads` only if asked.
        Called for every send, so it allocates nothing.
        """
        if (grads and self.grads != slot.grads) or self.spec != slot.spec:
            return False
        for tensor, (shape, dtype) in zip(slot.tensors, self.forms, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                return False
        return True


class Buffers:
    """Memory on `device` for what a rank receives. A step that repeats receives everything where the last one did.

    Each tensor of `take` is that of a buffer that nothing else holds, or of a new one: who holds a tensor that was
    received, or a view of it, keeps it as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[Form, list[Tensor]] = {}
        self._used: set[Form] = set()  # in this step
        self._lasting: dict[Form, list[Tensor]] = {}  # which only steps that `stay` use
        self._other: dict[Form, list[Tensor]] | None = None  # those of other steps, in such a step
        self._again = False  # whether such a step receives as before

    def begin(self) -> None:
        """Call before a step. Frees buffers of shapes that the last one has not used, and leaves others to who still
        holds them.
        """
        if self._other is not None:
            self._kept, self._other, self._again = self._other, None, False
        self._kept = {form: list(filter(_is_free, self._kept[form])) for form in self._used & self._kept.keys()}
        self._used = set()

    def stay(self, *, again: bool) -> None:
        """Call after `begin` for a step that receives at addresses that graphs know, into buffers that only such steps
        use. If it repeats one `again`, each receive comes where it did, whoever still holds what came there.
        """
        self._again = again
        if self._other is None:
            self._kept, self._other = self._lasting, self._kept

    @property
    def held(self) -> set[int]:
        """The addresses of those that something else holds."""
        return {each.data_ptr() for kept in self._kept.values() for each in kept if not _is_free(each)}

    def have(self, tensor: Tensor) -> bool:
        """Returns True if the tensor is in one of the buffers."""
        return any(storage_key(each) == storage_key(tensor) for kept in self._kept.values() for each in kept)

    def take(self, form: Form, place: int) -> tuple[Tensor, int]:
        """Memory for a tensor that is received, and its place, where the next step looks first."""
        kept = self._kept.setdefault(form, [])
        self._used.add(form)
        if place >= len(kept) or not (self._again or _is_free(kept[place])):
            place = next((other for other, each in enumerate(kept) if _is_free(each)), len(kept))
            if place == len(kept):
                kept.append(torch.empty(form[0], dtype=form[1], device=self.device))
        return kept[place].data, place  # with a version of its own


def _is_free(buffer: Tensor) -> bool:
    """Whether nothing else holds its memory, in this process or another one, or has given it back to the system."""
    if holders(buffer) > 1 or (buffer.device.type == "cpu" and buffer.is_shared()):
        return False
    return buffer.data_ptr() != 0 or not buffer.numel()


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
        return Metadata(None, ((shape, self.dtype),), (self.dtype.is_floating_point or self.dtype.is_complex,))


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


# The marks with which messages begin that are not what their receivers expect (`wires`). A mark is read straight from
# memory, since operators of torch would take as long as a small backward.
_MARKS: dict[torch.dtype, tuple[type[ctypes.c_int16 | ctypes.c_int32 | ctypes.c_int64], int]] = {
    torch.float64: (ctypes.c_int64, 0x7FF9_ACED_FACE_0B0E),
    torch.float32: (ctypes.c_int32, 0x7FD1_CE0B),
    torch.float16: (ctypes.c_int16, 0x7F2B),
    torch.bfloat16: (ctypes.c_int16, 0x7FEB),
}
_MARKS |= {torch.complex128: _MARKS[torch.float64], torch.complex64: _MARKS[torch.float32]}


class Unused(Tensor):
    """A gradient that does not exist: zeros without memory, with the shape, dtype and device of the value."""

    @classmethod
    def of(cls, value: Tensor) -> Unused:
        """The missing gradient of a value."""
        return value.detach().new_zeros(()).expand(value.shape).as_subclass(cls)

    def zeros(self) -> Tensor:
        """The zeros as a plain tensor with memory."""
        return self.as_subclass(Tensor).contiguous()


def to_message(gradient: Tensor) -> Tensor:
    """What is sent for a tensor that does not exist, or for a contiguous one that is marked all the same."""
    if isinstance(gradient, Unused):
        message = gradient.zeros()
        if bears_mark(message.shape, message.dtype) and message.device.type == "cpu":
            integer, mark = _MARKS[message.dtype]
            integer.from_address(message.data_ptr()).value = mark
        return message
    message = gradient.clone()
    (torch.view_as_real(message) if message.is_complex() else message).view(-1)[0].fill_(torch.nan)
    return message


def bears_mark(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether a message between CPUs of this shape and dtype can begin with the mark."""
    return dtype in _MARKS and shape.numel() > 0


def is_marked(message: Tensor) -> bool:
    """Whether a tensor, which is contiguous, begins with the mark, or does not exist. Reads nothing from a GPU."""
    if type(message) is not Tensor or message.device.type != "cpu":  # others may have no memory of their own
        return isinstance(message, Unused)
    address, kind = message.data_ptr(), _MARKS.get(message.dtype)
    return address != 0 and kind is not None and kind[0].from_address(address).value == kind[1]


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


def may_be_overwritten(tensor: Tensor, received: Buffers | None = None) -> bool:
    """Returns True if the tensor's memory may be overwritten after a stage has returned it, as in a static buffer. This
    may happen if it was written in place before, or if it belongs to no graph, since a module may hold it unseen, but
    not if it is `received`.
    """
    if tensor.is_inference() or tensor._version:
        return True
    return tensor.grad_fn is None and not (received is not None and received.have(tensor))
