"""Plain values as bytes, between ranks. Reading them imports nothing and calls nothing but the types of plain values,
so whoever gets to send bytes to a rank cannot have it run code.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES

from pipeflow.core.errors import UsageError

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, slice, range)
_CONTAINERS = (OrderedDict, defaultdict, deque, torch.Size)


def pack(value: object) -> bytes:
    """`value` as bytes: numbers, texts, containers, dtypes, named tuples, and values of pipeflow's own."""
    return pickle.dumps(value)


def unpack(body: bytes) -> Any:
    """The value. Raises UsageError for bytes that would make anything else."""
    try:
        return _Reader(io.BytesIO(body)).load()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"a rank sent bytes that are no plain value: {error}") from None


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if not _is_plain(found):
            raise UsageError(f"a rank sent a {module}.{name}, which is no plain value, or not imported on this rank")
        return found


def _is_plain(found: object) -> bool:
    """Whether making one of it runs no code but its own constructor's, of a value's type."""
    if isinstance(found, torch.dtype):
        return True
    if not isinstance(found, type):
        return False
    is_ours = found.__module__.startswith("pipeflow.") and dataclasses.is_dataclass(found)
    is_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return (
        found in (*_PLAIN, *_CONTAINERS) or found in SUPPORTED_NODES or is_ours or is_tuple or issubclass(found, Enum)
    )
