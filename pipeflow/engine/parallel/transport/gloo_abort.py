"""Abort: ends the wait for one of gloo's transfers from another thread. When a connection breaks, gloo ends the waits
for transfers that have not begun. It does not end the waits for transfers that are half received or half sent. Its
classes have a method for that, `abort`, which torch does not offer in Python; so it is called in torch's library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.distributed import Work

_CLASSES = ("SendWork", "RecvWork")
_TO_METHODS = 2 * ctypes.sizeof(ctypes.c_void_p)  # from the start of a class's table: two entries come before


def abort(work: object) -> bool:
    """Makes `work.wait()` return False, now or when it is called next.

    Returns False, and does nothing, if `work` is not a transfer of gloo's or torch's library is not as expected.
    """
    if not isinstance(work, Work):  # what is behind the start of another object is anything
        return False
    pointer = _read(id(work) + object.__basicsize__)  # where pybind11 keeps it
    method = _methods().get(_read(pointer)) if pointer else None
    if method is None:
        return False
    method(pointer)
    return True


def _read(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


@cache
def _methods() -> dict[int, Callable[[int], None]]:
    """The `abort` method of each class, by the address with which objects of that class begin."""
    found: dict[int, Callable[[int], None]] = {}
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for name in _CLASSES:
            mangled = f"N4c10d16ProcessGroupGloo{len(name)}{name}"
            method = library[f"_Z{mangled}5abortEv"]
            method.argtypes, method.restype = [ctypes.c_void_p], None
            found[ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{mangled}E")) + _TO_METHODS] = method
    except (OSError, AttributeError, ValueError):
        found.clear()
    return found
