"""Painters: how a piece of a drawing looks. `Letters` is for plain text, `Colours` for a terminal that has
them. Both give (text, style) pairs, which rich takes as they are; rich itself is not needed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, final

from pipeflow.core.action import Kind
from pipeflow.draw.layout import Piece

Painted = tuple[str, str]

NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}


class Painter(Protocol):
    """Paints the pieces of a timeline."""

    def piece(self, piece: Piece) -> Iterator[Painted]:
        """Exactly `piece.width` columns."""

    def idle(self, first: int, end: int) -> Painted:
        """Exactly the columns `first` to `end`, excluded."""

    def legend(self, kinds: Iterable[Kind]) -> Iterator[Painted]:
        """What the looks mean."""


def paint(line: list[Piece], width: int, painter: Painter) -> Iterator[Painted]:
    """One rank's line of `width` columns."""
    column = 0
    for piece in line:
        if column < piece.first:
            yield painter.idle(column, piece.first)
        yield from painter.piece(piece)
        column = piece.end
    if column < width:
        yield painter.idle(column, width)


@final
@dataclass(frozen=True, slots=True)
class Letters:
    """Kind and microbatch as letter and number. Upper case is chunk 0, lower case chunk 1; when a rank has more
    than two `chunks` an action says its stage, as in "4F0". A dot every `grid` columns is idle time. All ASCII.
    """

    chunks: int
    grid: int = 1

    def piece(self, piece: Piece) -> Iterator[Painted]:
        text = self.label(piece)
        if len(text) > piece.width:
            yield self._letter(piece.kind, piece.chunk).ljust(piece.width, "-"), ""
        else:
            yield text.ljust(piece.width - 1, "-").ljust(piece.width), ""

    def idle(self, first: int, end: int) -> Painted:
        return "".join(" " if column % self.grid else "." for column in range(first, end)), ""

    def label(self, piece: Piece) -> str:
        """All that there is to say about a piece, however wide it is."""
        if piece.action is None:
            return self._letter(piece.kind, piece.chunk)
        if self.chunks > 2:
            return str(piece.action)
        return f"{self._letter(piece.kind, piece.chunk)}{piece.action.microbatch}"

    def legend(self, kinds: Iterable[Kind]) -> Iterator[Painted]:
        yield "   ".join(f"{kind.value} {NAMES[kind]}" for kind in kinds), ""
        if self.chunks == 2:
            yield "   lower case: chunk 1", ""
        if self.chunks > 2:
            yield "   4F0: stage 4, microbatch 0", ""
        yield "   . idle", ""

    def _letter(self, kind: Kind, chunk: int) -> str:
        return kind.value.lower() if self.chunks == 2 and chunk else kind.value


Colour = tuple[int, int, int]

COLOURS: dict[Kind, tuple[Colour, str]] = {  # and the nearest of the 16 that every terminal has
    Kind.F: ((92, 143, 235), "blue"),
    Kind.B: ((61, 174, 110), "green"),
    Kind.I: ((70, 190, 190), "cyan"),
    Kind.W: ((232, 170, 66), "yellow"),
}
INK = (16, 20, 28), "black"
EDGE = "\u258a"  # the left three quarters of a cell: a thin gap between two pieces


@final
@dataclass(frozen=True, slots=True)
class Colours:
    """Kind as hue, chunk (of at most `chunks`) as shade, microbatch as number. With `few` colours there are two
    shades.
    """

    chunks: int
    few: bool = False

    def piece(self, piece: Piece) -> Iterator[Painted]:
        colour = self._colour(piece.kind, piece.chunk)
        if piece.action is None:
            yield " " * piece.width, f"on {colour}"
            return
        number = str(piece.action.microbatch)
        room = piece.width - 1
        ink = INK[1] if self.few else _rgb(INK[0])
        if room:
            yield (number if len(number) <= room else "").center(room), f"{ink} on {colour}"
        yield EDGE, colour

    def idle(self, first: int, end: int) -> Painted:
        return "\u00b7" * (end - first), "bright_black"

    def legend(self, kinds: Iterable[Kind]) -> Iterator[Painted]:
        for kind in kinds:
            for chunk in range(self.chunks):
                yield "  ", f"on {self._colour(kind, chunk)}"
            yield f" {NAMES[kind]}   ", ""
        if self.chunks > 1:
            yield "lighter: later chunk   ", ""
        yield "\u00b7\u00b7", "bright_black"
        yield " idle", ""

    def _colour(self, kind: Kind, chunk: int) -> str:
        """The kind's colour, mixed with the more white the later the chunk."""
        colour, name = COLOURS[kind]
        if self.few:
            return f"bright_{name}" if chunk else name
        white = 0.55 * chunk / max(self.chunks - 1, 1)
        red, green, blue = (round(part + (255 - part) * white) for part in colour)
        return _rgb((red, green, blue))


def _rgb(colour: Colour) -> str:
    return "rgb({},{},{})".format(*colour)
