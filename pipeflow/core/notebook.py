"""Notebook: values that a notebook shows as pictures. Must not contain: the drawing itself, which a higher package
provides with `draw_as`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

Drawing = Callable[[Any], str | None]
T = TypeVar("T", bound="Shown")


class Shown:
    """A value that a notebook shows as a picture: HTML or SVG, or text if there is no picture."""

    __slots__ = ()
    drawing: ClassVar[Drawing | None] = None

    def _repr_html_(self) -> str | None:
        draw = type(self).drawing
        return None if draw is None else draw(self)


def draw_as(kind: type[T]) -> Callable[[Callable[[T], str | None]], Callable[[T], str | None]]:
    """Decorator that makes a function draw all values of `kind`. The function returns HTML or SVG, or None for text."""

    def register(draw: Callable[[T], str | None]) -> Callable[[T], str | None]:
        kind.drawing = staticmethod(draw)
        return draw

    return register
