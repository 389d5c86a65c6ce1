"""Registries: classes that a configuration names, with their arguments. What must not live here: what is built of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any, TypeVar

from pipeflow.core.errors import UsageError

C = TypeVar("C")


class Registry:
    """Classes and functions by their names; beside those that were registered, the classes of the modules of
    `third_party_library`.

    >>> layers = Registry("layers")
    >>> @layers.register_module
    ... class Block: ...
    >>> layers.get_module("Block") is Block
    True
    """

    def __init__(self, name: str, third_party_library: Sequence[ModuleType] = ()) -> None:
        self.name = name
        self._libraries = tuple(third_party_library)
        self._modules: dict[str, Any] = {}

    def register_module(self, module: C) -> C:
        """Notes it under its name, and returns it, so that it may be a decorator. Raises UsageError where another one
        has that name.
        """
        name: str = module.__name__  # type: ignore[attr-defined]  # a class or a function
        known = self._modules.setdefault(name, module)
        if _origin(known) != _origin(module):
            raise UsageError(f"{self.name} has another {name!r} already, of {known.__module__}: rename one of them")
        self._modules[name] = module
        return module

    def get_module(self, name: str) -> Any:
        """Raises UsageError for a name that is not registered."""
        found = self._found(name)
        if found is None:
            near = get_close_matches(name, self._names(), n=1, cutoff=0.0)
            hint = f": did you mean {near[0]!r}?" if near else ": register it with register_module"
            raise UsageError(f"{self.name} has no {name!r}{hint}")
        return found

    def has(self, name: str) -> bool:
        """Whether it is registered, or a class of a library."""
        return self._found(name) is not None

    def _names(self) -> list[str]:
        of_libraries = (name for library in self._libraries for name in vars(library) if self.has(name))
        return [*self._modules, *of_libraries]

    def _found(self, name: str) -> Any:
        if name in self._modules:
            return self._modules[name]
        found = (vars(library).get(name) for library in self._libraries)
        return next((each for each in found if isinstance(each, type)), None)


def makers(specifications: Sequence[Mapping[str, Any]], *registries: Registry) -> list[Callable[[], Any]]:
    """A callable for each specification, a dict whose `type` names a class of one of `registries` and whose other
    entries are its arguments; nothing is made yet. The first registry that has the name counts.

    >>> layers = Registry("layers")
    >>> _ = layers.register_module(complex)
    >>> [make] = makers([{"type": "complex", "real": 1, "imag": 2}], layers)
    >>> make()
    (1+2j)

    Raises UsageError for what is no list of such dicts, for a name that no registry has, and for arguments that the
    class does not take.
    """
    if isinstance(specifications, str | Mapping) or not isinstance(specifications, Sequence):
        raise UsageError(
            f"layers are specified by a list of dicts such as {_EXAMPLE}, got {type(specifications).__name__}"
        )
    return [_maker(index, each, registries) for index, each in enumerate(specifications)]


_EXAMPLE = '{"type": "Linear", "in_features": 4, "out_features": 4}'


def _maker(index: int, specification: object, registries: Sequence[Registry]) -> Callable[[], Any]:
    if not isinstance(specification, Mapping) or not isinstance(specification.get("type"), str):
        raise UsageError(
            f'layer {index} must be a dict whose "type" is a name, such as {_EXAMPLE}, got {specification!r}'
        )
    name, arguments = specification["type"], {key: value for key, value in specification.items() if key != "type"}
    registry = next((each for each in registries if each.has(name)), registries[0])
    kind = registry.get_module(name)
    try:
        signature(kind).bind(**arguments)
    except TypeError as error:
        raise UsageError(f"layer {index}, {name!r} of {registry.name}: {error}") from None
    return partial(kind, **arguments)


def _origin(module: Any) -> tuple[str, str]:
    """Where it is defined: one that is imported again is the same."""
    return module.__module__, module.__qualname__
