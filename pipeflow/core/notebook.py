"""Notebook: values that a notebook shows as pictures. What must not live here: how they are drawn, which is the
business of a floor above; whoever stands on both says it with `draw_as`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

Drawing = Callable[[Any], str | None]
T = TypeVar("T", bound="Shown")


class Shown:
    """A value with a picture: HTML or SVG, or None when it has none and is shown as text."""

    __slots__ = ()
    drawing: ClassVar[Drawing | None] = None

    def _repr_html_(self) -> str | None:
        draw = type(self).drawing
        return None if draw is None else draw(self)


def draw_as(kind: type[T]) -> Callable[[Callable[[T], str | None]], Callable[[T], str | None]]:
    """Makes a function the one that draws values of `kind`."""

    def register(draw: Callable[[T], str | None]) -> Callable[[T], str | None]:
        kind.drawing = staticmethod(draw)
        return draw

    return register
