"""Registries: classes that a configuration names. What must not live here: what is built of them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, TypeVar

from pipeflow.core.errors import UsageError

C = TypeVar("C")


class Registry:
    """Classes and functions by their names.

    >>> layers = Registry("layers")
    >>> @layers.register_module
    ... class Block: ...
    >>> layers.get_module("Block") is Block
    True
    """

    def __init__(self, name: str) -> None:
        self.name = name
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
        if not self.has(name):
            near = get_close_matches(name, self._modules, n=1, cutoff=0.0)
            hint = f": did you mean {near[0]!r}?" if near else ": register it with register_module"
            raise UsageError(f"{self.name} has no {name!r}{hint}")
        return self._modules[name]

    def has(self, name: str) -> bool:
        """Whether it is registered."""
        return name in self._modules


def _origin(module: Any) -> tuple[str, str]:
    """Where it is defined: one that is imported again is the same."""
    return module.__module__, module.__qualname__
