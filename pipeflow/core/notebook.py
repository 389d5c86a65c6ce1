"""Notebook: values that a notebook shows as pictures. Must not contain: the drawing itself, which a higher package
provides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DRAWINGS: dict[type[Shown], Callable[[Any], str | None]] = {}
"""Per type of value, the function that draws it. It returns HTML or SVG, or None for text."""


class Shown:
    """A value that a notebook shows as a picture: HTML or SVG, or text if there is no picture."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        draw = DRAWINGS.get(type(self))
        return None if draw is None else draw(self)
