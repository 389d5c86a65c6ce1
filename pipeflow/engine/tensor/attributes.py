"""Attributes: reads attributes of modules whose classes are not known. Must not contain: what they mean."""

from __future__ import annotations

from typing import Any

from torch import nn


def attribute_of(holder: object, name: str) -> Any:
    """An attribute of a model's own class, or None without it. Such a class may define a `__getattr__` that raises any
    error for a name that it does not have.
    """
    try:
        return getattr(holder, name, None)
    except Exception:
        return None


def has_attribute(module: nn.Module, name: str) -> bool:
    """Returns True if a module or its class has an attribute. Unlike `hasattr`, runs no property or `__getattr__`."""
    own = (vars(module), module._parameters, module._buffers, module._modules)
    return any(name in each for each in (*own, *map(vars, type(module).__mro__)))
