"""Registry: looks up classes by the names in a configuration. Must not contain: how they become a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any, TypeVar

from pipeflow.core.errors import UsageError, closest

C = TypeVar("C")


class Registry:
    """Classes and functions by name.

    Args:
        name: name of the registry, for errors.
        third_party_library: Python modules whose classes can be looked up too.

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
        """Registers a class or function under its name and returns it; can be used as a decorator. Raises UsageError if
        another one has that name.
        """
        name: str = module.__name__  # type: ignore[attr-defined]  # a class or a function
        known = self._modules.setdefault(name, module)
        if _origin(known) != _origin(module):
            raise UsageError(f"{self.name} already has another {name!r}, from {known.__module__}: rename one of them")
        self._modules[name] = module
        return module

    def get_module(self, name: str) -> Any:
        """Returns the class or function `name`. Raises UsageError if there is none."""
        found = self._found(name)
        if found is None:
            near = closest(name, self._names(), cutoff=0.0)
            hint = f": did you mean {near!r}?" if near else ": register it with register_module"
            raise UsageError(f"{self.name} has no {name!r}{hint}")
        return found

    def has(self, name: str) -> bool:
        """True if `name` is registered, or a class of one of the libraries."""
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
    """Returns a callable for each specification that makes the specified object when it is called.

    Args:
        specifications: dicts; "type" names a class, the other entries are its keyword arguments.
        registries: where to look up the class; the first registry that has the name is used.

    >>> layers = Registry("layers")
    >>> _ = layers.register_module(complex)
    >>> [make] = makers([{"type": "complex", "real": 1, "imag": 2}], layers)
    >>> make()
    (1+2j)

    Raises UsageError if `specifications` is not a list of such dicts, if no registry has the name, or if the class does
    not take the arguments.
    """
    if isinstance(specifications, str | Mapping) or not isinstance(specifications, Sequence):
        raise UsageError(
            f"layers must be specified by a list of dicts such as {_EXAMPLE}, got {type(specifications).__name__}"
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
    """Module and name where it is defined; they stay the same if the module is imported again."""
    return module.__module__, module.__qualname__
