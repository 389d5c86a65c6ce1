"""Plain values and tensors as `torch.save` writes them, read so that no more memory is taken than they have bytes. Must
not contain: names of weights, or files of a checkpoint.

torch's `weights_only` runs no code, but it calls what a pickle names with what the pickle gives: `bytearray` with a
number, or one that copies a long text, again and again. So a pickle is followed here before it is read.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipeflow.engine.torch_private.tensors import storage_types

_ITEMSIZES = {name: dtype.itemsize for dtype, name in storage_types().items()}
_ITEMSIZES["UntypedStorage"] = 1
_VIEWS = {f"torch._utils._rebuild_{kind}" for kind in ("tensor_v2", "tensor_v3", "qtensor")}  # of a storage
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
_EXPANDED = 2**26  # bytes that tensors may have beyond their storages, in all
_FREE = {  # these make nothing that is large
    *("torch._utils._rebuild_parameter", "torch._utils._rebuild_sparse_tensor", "torch.serialization._get_layout"),
    *("torch.device", "builtins.complex"),
}
_COPIES = {  # these copy what they are given
    *("collections.OrderedDict", "collections.Counter", "torch.Size", "_codecs.encode"),
    *("builtins.bytearray", "builtins.set"),
}
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names that pickles of protocol 2 use


def loaded(stored: bytes) -> Any:
    """The value in the bytes of `torch.save`. Raises ValueError, or an error of zipfile, pickle or torch, if they hold
    anything but plain values and tensors, or if these would take more memory than `stored`.
    """
    with zipfile.ZipFile(io.BytesIO(stored)) as records:
        sizes = {}
        for record in records.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                raise ValueError(f"{record.filename!r} is compressed")
            sizes[record.filename.partition("/")[2]] = record.file_size
        if sum(record.file_size for record in records.infolist()) > len(stored):
            raise ValueError("its records overlap")
        for record in records.infolist():
            if record.filename.endswith("/data.pkl"):
                _Follower(sizes, len(stored)).follow(records.read(record))
    return torch.load(io.BytesIO(stored), weights_only=True, map_location="cpu")


class _Name(str):
    """A class or function that a pickle names."""

    __slots__ = ()


class _Many:
    """A value of which only the number of entries is known."""

    __slots__ = ("entries",)

    def __init__(self, entries: int = 0) -> None:
        self.entries = entries


class _Storage:
    """A storage of which a tensor is a view."""

    __slots__ = ("bytes", "itemsize")

    def __init__(self, size: int, itemsize: int) -> None:
        self.bytes = size
        self.itemsize = itemsize

    def beyond(self, arguments: tuple[Any, ...]) -> int:
        """Bytes that a view has beyond the storage's, since it repeats entries. Raises ValueError for one that goes
        past its end, where torch would make it longer.
        """
        _, offset, sizes, strides, *others = arguments
        itemsize = _dtype(others[2]).itemsize if len(others) > 2 and isinstance(others[2], _Name) else self.itemsize
        numbers = offset, *sizes, *strides
        if len(sizes) != len(strides) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("a tensor has no shape")
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if 0 not in sizes and (last + 1) * itemsize > self.bytes:
            raise ValueError("a tensor is larger than its storage")
        return max(0, int(math.prod(sizes)) * itemsize - self.bytes)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return found


class _Follower:
    """Follows a pickle without making its values, and adds up what they would copy.

    Args:
        sizes: bytes of each record of the archive, by name.
        most: entries and bytes that may be copied in all.
    """

    def __init__(self, sizes: Mapping[str, int], most: int) -> None:
        self._sizes = sizes
        self._left = most
        self._expanded = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[Any, Any] = {}
        self._pushes: Mapping[str, Callable[[Any], Any]] = {
            **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"), lambda _: None),
            **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINSTRING"), lambda x: x),
            **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), lambda _: _Many()),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda place: self._memo[place]),
            "EMPTY_TUPLE": lambda _: (),
            "TUPLE": lambda _: tuple(self._marked()),
            "GLOBAL": _named,
        }

    def follow(self, pickled: bytes) -> None:
        """Raises ValueError for a pickle that would copy too much, and LookupError for one that is none."""
        for operation, argument, _ in pickletools.genops(pickled):
            name = operation.name
            if name in self._pushes:
                pushed = self._pushes[name](argument)  # which may change the stack
                self._stack.append(pushed)
            elif name in ("BINPUT", "LONG_BINPUT"):
                self._memo[argument] = self._stack[-1]
            elif name == "MARK":
                self._marks.append(self._stack)
                self._stack = []
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                self._stack.append(self._popped(int(name[-1])))
            elif name in ("APPEND", "SETITEM"):
                self._add(self._popped(1 if name == "APPEND" else 2))
            elif name in ("APPENDS", "SETITEMS"):
                self._add(self._marked())
            elif name == "BINPERSID":
                self._stack.append(self._storage(self._stack.pop()))
            elif name in ("REDUCE", "NEWOBJ", "BUILD"):
                self._call(*self._popped(2), is_state=name == "BUILD")
            elif name not in ("PROTO", "STOP"):
                raise ValueError(f"its pickle has {name}")

    def _popped(self, many: int) -> tuple[Any, ...]:
        if len(self._stack) < many:
            raise IndexError("its pickle takes what is not there")
        found = tuple(self._stack[-many:])
        del self._stack[-many:]
        return found

    def _marked(self) -> list[Any]:
        found, self._stack = self._stack, self._marks.pop()
        return found

    def _add(self, entries: Any) -> None:
        if isinstance(self._stack[-1], _Many):
            self._stack[-1].entries += len(entries)

    def _storage(self, told: Any) -> _Storage:
        """The storage that a persistent id describes. Raises ValueError if its record has not so many bytes."""
        _, kind, key, _, numel = told
        size = _ITEMSIZES.get(kind.removeprefix("torch.").removeprefix("storage.")) if isinstance(kind, _Name) else None
        if size is None or type(numel) is not int or not isinstance(key, str):
            raise ValueError("a storage has no kind or size")
        if not 0 <= numel * size <= self._sizes.get(f"data/{key}", -1):
            raise ValueError(f"a storage of {numel} entries is not there")
        return _Storage(numel * size, size)

    def _call(self, what: Any, given: Any, *, is_state: bool) -> None:
        """Calls a function with arguments, or gives an object its state, and pushes the result."""
        if is_state:
            self._take(given)
            self._stack.append(what)
            return
        if not isinstance(what, _Name) or not isinstance(given, tuple):
            raise ValueError("it calls what is no function")
        if what in _VIEWS and isinstance(given[0], _Storage):
            self._expanded += given[0].beyond(given)
            if self._expanded > _EXPANDED:
                raise ValueError("its tensors repeat too many entries")
        elif what == _WITH_ATTRIBUTES:
            function, kind, arguments, state = given
            if kind not in ("torch.Tensor", "torch.nn.parameter.Parameter") and not _is_allowed(kind):
                raise ValueError(f"it has a {kind}, not plain values")
            self._call(function, arguments, is_state=False)
            self._call(self._stack.pop(), state, is_state=True)
            return
        elif what in _COPIES:
            for each in given:
                self._take(each, is_length=what == "builtins.bytearray")
        elif what not in _FREE and not _is_allowed(what):
            raise ValueError(f"it has a {what}, not plain values")
        self._stack.append(_Many(sum(map(_entries, given))))

    def _take(self, value: Any, *, is_length: bool = False) -> None:
        self._left -= value if is_length and type(value) is int else _entries(value)
        if self._left < 0:
            raise ValueError("its values would take more memory than it has bytes")


def _entries(value: Any) -> int:
    if isinstance(value, str | bytes | tuple):
        return len(value)
    return value.entries if isinstance(value, _Many) else 1


def _named(told: str) -> _Name:
    module, _, name = told.partition(" ")
    return _Name(f"{_PYTHON_2.get(module, module)}.{name}")


def _is_allowed(name: str) -> bool:
    """True if the program itself has allowed a class or function, with torch.serialization.add_safe_globals."""
    for each in torch.serialization.get_safe_globals():
        known = each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}"
        if known == name:
            return True
    return False
