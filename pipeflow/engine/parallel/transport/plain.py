"""Plain values as bytes: JSON in which each list begins with the name of its type. Reading imports nothing and makes
only the types listed here, named tuples, and types that this rank has registered with torch's pytrees. So a sender of
bytes cannot make a rank run code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from typing import Any

import torch

from pipeflow.core.action import Action
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.timeline import Span
from pipeflow.engine.torch_private.trees import SUPPORTED_NODES

_SCALARS = frozenset({type(None), bool, int, float, str})
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_FACTORIES = {factory.__name__: factory for factory in (bool, int, float, str, list, tuple, set, dict)}
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


def pack(value: object) -> bytes:
    """`value` as bytes. Accepts numbers, strings, containers, dtypes, named tuples, nodes of torch's pytrees, and those
    values of `pipeflow.core` that ranks exchange. Raises UsageError for anything else.
    """
    try:
        return json.dumps(_written(value)).encode()
    except RecursionError:
        raise UsageError("a value that contains itself, or is nested too deeply, is not a plain value") from None


def unpack(body: bytes) -> Any:
    """The value that `pack` wrote. Raises UsageError if the bytes are not such a value."""
    try:
        return _read(json.loads(body.decode("ascii")))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"a rank sent bytes that are not a plain value: {reason}") from None


def _written(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    write = _WRITERS.get(kind)
    if write is not None:
        return write(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ["named", kind.__module__, kind.__qualname__, *map(_written, value)]
    if kind in SUPPORTED_NODES:
        children, context = SUPPORTED_NODES[kind].flatten_fn(value)
        return ["node", _name(kind), _written(context), *map(_written, children)]
    if kind is type and value in _FACTORIES.values():  # the factory of a defaultdict
        return ["type", value.__name__]
    raise UsageError(f"a {kind.__name__} is not a plain value, so ranks cannot send it to each other: {value!r}")


def _writer(tag: str) -> Callable[[Any], list[Any]]:
    return lambda values: [tag, *[_written(value) for value in values]]


_WRITERS: dict[type, Callable[[Any], list[Any]]] = {
    **{kind: _writer(kind.__name__) for kind in (list, tuple, set, frozenset)},
    dict: lambda value: ["dict", *([_written(key), _written(held)] for key, held in value.items())],
    torch.Size: lambda value: ["Size", *value],
    torch.dtype: lambda value: ["dtype", str(value)],
    Action: lambda value: ["Action", str(value)],
    Placement: lambda value: ["Placement", _written(value.paths)],
    Span: lambda value: ["Span", *(_written(getattr(value, each.name)) for each in fields(Span))],
}


def _read(written: Any) -> Any:
    if type(written) in _SCALARS:
        return written
    tag, *rest = written
    return _READERS[tag](*rest)


def _reader(make: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    return lambda *values: make([_read(value) for value in values])


def _dict(*pairs: list[Any]) -> dict[Any, Any]:
    return {_read(key): _read(value) for key, value in pairs}


def _named(module: str, qualname: str, *fields: Any) -> Any:
    """A named tuple of a class that is already loaded, made without running code of the class."""
    found = reduce(lambda holder, name: vars(holder)[name], qualname.split("."), sys.modules[module])
    if not (
        isinstance(found, type) and issubclass(found, tuple) and len(getattr(found, "_fields", ())) == len(fields) > 0
    ):
        raise TypeError(f"{module}.{qualname} has not {len(fields)} fields, or is no named tuple")
    return tuple.__new__(found, map(_read, fields))


def _node(name: str, context: Any, *children: Any) -> Any:
    [kind] = (kind for kind in SUPPORTED_NODES if _name(kind) == name)
    return SUPPORTED_NODES[kind].unflatten_fn(list(map(_read, children)), _read(context))


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_READERS: dict[str, Callable[..., Any]] = {
    **{tag: _reader(make) for tag, make in _SEQUENCES.items()},
    "dict": _dict,
    "named": _named,
    "node": _node,
    "type": _FACTORIES.__getitem__,
    "dtype": _DTYPES.__getitem__,
    "Action": Action.parse,
    "Placement": lambda paths: Placement(_read(paths)),
    "Span": lambda *fields: Span(*map(_read, fields)),
}
