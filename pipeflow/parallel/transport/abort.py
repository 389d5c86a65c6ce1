"""Ends the wait for one of gloo's transfers, from another thread. When a connection breaks, gloo wakes up whoever waits
for a transfer that has not begun, but nobody who waits for one that is half received or half sent. Its class has a
method for that, `abort`, which torch does not offer in Python; so it is called in torch's library.
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


def abort(work: Work) -> bool:
    """Has `work.wait()` return False, now or when it is called next. False where this is no transfer of gloo's, or
    torch's library is not as expected: then nothing is done.
    """
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
    """By the address that an object of a class begins with, the `abort` of that class."""
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
