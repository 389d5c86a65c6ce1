"""Several: arguments that take several names, paths or numbers. One alone is taken as a list of one, so that letters of
a name are never taken for names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex

from pipeflow.core.errors import UsageError


def names_of(what: str, given: object) -> tuple[str, ...]:
    """The names of an argument called `what`. Raises UsageError for anything but a name, or several of them."""
    return _several(what, given, str, "names")


def paths_of(what: str, given: object) -> tuple[str | os.PathLike[str], ...]:
    """The paths of an argument called `what`. Raises UsageError for anything but a path, or several of them."""
    return _several(what, given, (str, os.PathLike), "paths")


def numbers_of(what: str, given: object) -> tuple[int, ...]:
    """The whole numbers of an argument called `what`. Raises UsageError for anything but a number, or several."""
    return tuple(map(index, _several(what, given, SupportsIndex, "whole numbers")))


def _several(what: str, given: Any, kind: type | tuple[type, ...], said: str) -> tuple[Any, ...]:
    is_several = isinstance(given, Iterable) and not isinstance(given, str | bytes | os.PathLike)
    values = tuple(given) if is_several else (given,)
    if wrong := [value for value in values if not isinstance(value, kind) or isinstance(value, bool)]:
        raise UsageError(f"{what} must be a list of {said}, got {wrong[0]!r}")
    return values
