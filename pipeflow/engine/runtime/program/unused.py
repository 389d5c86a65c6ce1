"""Unused: the gradient of a value that later stages did not use. Autograd has none for it, so weights that lead to this
value alone keep `.grad` None. A message without what its receiver expects begins with a mark. Must not contain: when
messages are sent.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

# Theory of operation
#
# A receive of a gradient is posted before its sender knows whether there is one, and that of an activation before its
# sender knows whether it is like those before. Between CPUs, a message without one begins with a mark: a NaN whose bits
# no computation makes. So it needs no other message, and its receiver reads one number, straight from memory, since
# operators of torch would take as long as a small backward. A tensor that begins with these bits all the same gets
# another NaN.

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
