"""Painters: the look of the pieces of a drawing. `Letters` is for plain text, `Colours` for a terminal with colours.
Both return (text, style) pairs as rich takes them. Must not contain: rich itself, which is not needed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.draw.captions import MemoryScale
from pipeflow.draw.colours import INK, RGB, average, between, css, hue, shade
from pipeflow.draw.lane_times import ColumnPiece, Line, Mixture

Painted = tuple[str, str]


class Painter(Protocol):
    """Paints the pieces of a timeline.

    Attributes:
        space: number of empty lines below a rank's memory, so that its bars do not seem to belong to the next rank.
    """

    space: ClassVar[int]

    def piece(self, piece: ColumnPiece) -> Iterator[Painted]:
        """A piece, exactly `piece.width` columns wide."""

    @property
    def about_mixtures(self) -> str:
        """The sentence that explains columns with several actions."""

    def mixture(self, mixture: Mixture, stream: Stream) -> Painted:
        """One column of a lane of `stream`."""

    def idle(self, first: int, end: int) -> Painted:
        """Idle time: the columns from `first` to `end`, excluded."""

    def memory(self, amounts: list[float], memory: MemoryScale) -> Painted:
        """The memory line, one amount per column."""

    def legend(self, kinds: Iterable[Kind], *, pairs: bool, memory: MemoryScale | None) -> Iterator[list[Painted]]:
        """The entries of the legend."""

    def word(self, action: Action) -> Painted:
        """An action within a text."""


def paint(line: Line, width: int, painter: Painter, stream: Stream) -> Iterator[Painted]:
    """The line of a lane, `width` columns wide. A rank counts as idle only where it computes nothing."""
    gap = painter.idle if stream is Stream.COMPUTE else _blank
    column = 0
    for piece in line:
        if column < piece.first:
            yield gap(column, piece.first)
        yield from painter.piece(piece) if isinstance(piece, ColumnPiece) else [painter.mixture(piece, stream)]
        column = piece.end
    if column < width:
        yield gap(column, width)


def _blank(first: int, end: int) -> Painted:
    return " " * (end - first), ""


@final
@dataclass(frozen=True, slots=True)
class Letters:
    """Plain ASCII text: the kind as a letter, the microbatch as a number.

    Upper case is chunk 0, lower case chunk 1. With more than two chunks per rank an action has its stage, as in "4F0".
    A dot is idle time.

    Attributes:
        chunks: the most stages that a rank holds.
        grid: the distance of the dots, in columns.
        joint: the character between the actions of a pair.
    """

    space: ClassVar[int] = 0
    chunks: int
    grid: int = 1
    joint: str = "+"

    def piece(self, piece: ColumnPiece) -> Iterator[Painted]:
        text, room = self.label(piece), piece.width - piece.joined
        if len(text) > room > 0:
            yield self._letter(piece.kind, piece.chunk).ljust(room, "-") + self.joint * piece.joined, ""
        else:
            last = self.joint if piece.joined else " "
            yield text[: piece.width].ljust(piece.width - 1, "-").ljust(piece.width, last), ""

    about_mixtures: ClassVar[str] = "Columns hold several actions and show the letter of one of them, in turn."

    def mixture(self, mixture: Mixture, stream: Stream) -> Painted:
        if mixture.shown is None:
            return ("." if stream is Stream.COMPUTE else " "), ""
        return self._letter(*mixture.shown), ""

    def idle(self, first: int, end: int) -> Painted:
        return "".join(" " if column % self.grid else "." for column in range(first, end)), ""

    def label(self, piece: ColumnPiece) -> str:
        """The full text of a piece, whatever its width."""
        if self.chunks > 2:
            return str(piece.action)
        return f"{self._letter(piece.kind, piece.chunk)}{piece.action.microbatch}"

    def memory(self, amounts: list[float], memory: MemoryScale) -> Painted:
        """A digit in each column in which the amount changes."""
        digits = [str(memory.digit(amount)) for amount in amounts]
        before = ["0", *digits]
        return "".join(" " if digit == last else digit for digit, last in zip(digits, before, strict=False)), ""

    def legend(self, kinds: Iterable[Kind], *, pairs: bool, memory: MemoryScale | None) -> Iterator[list[Painted]]:
        texts = [f"{kind.value} {DATAFLOW[kind].name}" for kind in kinds]
        texts += ["lower case: chunk 1"] if self.chunks == 2 else []
        texts += ["4F0: stage 4, microbatch 0"] if self.chunks > 2 else []
        texts += [f"{self.joint} pair, overlapped"] if pairs else []
        texts += [". idle", *([] if memory is None else [memory.about_digits])]
        yield from ([(text, "")] for text in texts)

    def word(self, action: Action) -> Painted:
        return str(action), ""

    def _letter(self, kind: Kind, chunk: int) -> str:
        return kind.value.lower() if self.chunks == 2 and chunk else kind.value


EDGE = "\u258a"  # the left three quarters of a cell: a thin gap between two pieces
BAR = "\u2584"  # the lower half of a cell: for streams beside the computations
JOINT = "+"
IDLE: RGB = (128, 128, 128)  # in mixtures; visible on light and on dark terminals
MEMORY = "#967db9", "cyan"
EIGHTHS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


@final
@dataclass(frozen=True, slots=True)
class Colours:
    """The kind as hue, the chunk as shade, the microbatch as a number.

    Attributes:
        chunks: the most stages that a rank holds.
        few: whether the terminal has 16 colours only; there are two shades then.
    """

    space: ClassVar[int] = 1
    chunks: int
    few: bool = False

    def piece(self, piece: ColumnPiece) -> Iterator[Painted]:
        colour = self._colour(piece.kind, piece.chunk)
        if not piece.is_computation:
            yield BAR * piece.width, colour
            return
        number = str(piece.action.microbatch)
        room = piece.width - 1
        ink = "black" if self.few else INK
        if room:
            yield (number if len(number) <= room else "").center(room), f"{ink} on {colour}"
        yield (JOINT, f"{ink} on {colour}") if piece.joined else (EDGE, colour)

    @property
    def about_mixtures(self) -> str:
        if self.few:
            return "Columns hold several actions and show the colour of one of them, in turn."
        return "Columns hold several actions and show their average colour, greyer where idle."

    def mixture(self, mixture: Mixture, stream: Stream) -> Painted:
        text = " " if stream is Stream.COMPUTE else BAR
        on = "on " if stream is Stream.COMPUTE else ""
        if self.few:
            if mixture.shown is None:
                return ("\u00b7", "bright_black") if stream is Stream.COMPUTE else (" ", "")
            return text, on + self._colour(*mixture.shown)
        colour, busy = average(mixture.shares, self.chunks)
        return text, on + css(between(colour, IDLE, busy))

    def idle(self, first: int, end: int) -> Painted:
        return "\u00b7" * (end - first), "bright_black"

    def memory(self, amounts: list[float], memory: MemoryScale) -> Painted:
        """A bar in every column, in eighths of a line."""
        return "".join(EIGHTHS[memory.eighth(amount)] for amount in amounts), self._memory()

    def legend(self, kinds: Iterable[Kind], *, pairs: bool, memory: MemoryScale | None) -> Iterator[list[Painted]]:
        for kind in kinds:
            colours = [self._colour(kind, chunk) for chunk in range(self.chunks)]
            computes = DATAFLOW[kind].stream is Stream.COMPUTE
            shades = [("  ", f"on {each}") if computes else (BAR * 2, each) for each in colours]
            yield [*shades, (f" {DATAFLOW[kind].name}", "")]
        if self.chunks > 1:
            yield [("lighter: later chunk", "")]
        if pairs:
            yield [(f"{JOINT} pair, overlapped", "")]
        yield [("\u00b7\u00b7", "bright_black"), (" idle", "")]
        if memory is not None:
            most = f" {memory.what}, at most {memory.text(memory.highest)}"
            yield [(EIGHTHS[1:], self._memory()), (most, "")]

    def word(self, action: Action) -> Painted:
        return str(action), self._colour(action.kind, 0)

    def _memory(self) -> str:
        return MEMORY[1] if self.few else MEMORY[0]

    def _colour(self, kind: Kind, chunk: int) -> str:
        """The colour of a kind, mixed with more white for later chunks."""
        if self.few:
            named = hue(kind).terminal
            return f"bright_{named}" if chunk else named
        return shade(kind, chunk, self.chunks)
