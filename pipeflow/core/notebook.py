"""Notebook: values that a notebook shows as pictures. Must not contain: the drawing itself, which a higher package
provides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """A value that a notebook shows as a picture: HTML or SVG, or text if there is no picture.

    Attributes:
        drawing: draws a value, as a static method: returns HTML or SVG, or None for text.
    """

    __slots__ = ()
    drawing: ClassVar[Callable[[Any], str | None] | None] = None

    def _repr_html_(self) -> str | None:
        draw = type(self).drawing
        return None if draw is None else draw(self)
