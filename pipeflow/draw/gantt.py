"""Timelines in a terminal or as plain text: one, two on one time scale, and a small one in a fixed form for docstrings
and messages. Painters say how pieces look: `Letters` in plain text, `Colours` in a terminal with colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import DATAFLOW, Stream
from pipeflow.core.text import printable
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import MemoryScale, Unit, axis, heading, memory_of, same_memory, summary
from pipeflow.draw.colours import INK, RGB, average, between, css, hue, shade
from pipeflow.draw.lane_times import (
    ColumnPiece,
    Line,
    Mixture,
    by_column,
    fit,
    kinds,
    lanes,
    num_chunks,
    pieces,
    round_half_up,
    shortest,
)
from pipeflow.draw.svg_timeline import svg

Painted = tuple[str, str]


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
        """A piece, exactly `piece.width` columns wide."""
        text, room = self.label(piece), piece.width - piece.joined
        if len(text) > room > 0:
            yield self._letter(piece.kind, piece.chunk).ljust(room, "-") + self.joint * piece.joined, ""
        else:
            last = self.joint if piece.joined else " "
            yield text[: piece.width].ljust(piece.width - 1, "-").ljust(piece.width, last), ""

    about_mixtures: ClassVar[str] = "Columns hold several actions and show the letter of one of them, in turn."

    def mixture(self, mixture: Mixture, stream: Stream) -> Painted:
        """One column of a lane of `stream`."""
        if mixture.shown is None:
            return ("." if stream is Stream.COMPUTE else " "), ""
        return self._letter(*mixture.shown), ""

    def idle(self, first: int, end: int) -> Painted:
        """Idle time: the columns from `first` to `end`, excluded."""
        return "".join(" " if column % self.grid else "." for column in range(first, end)), ""

    def label(self, piece: ColumnPiece) -> str:
        """The full text of a piece, whatever its width."""
        if self.chunks > 2:
            return str(piece.action)
        return f"{self._letter(piece.kind, piece.chunk)}{piece.action.part}"

    def memory(self, amounts: list[float], memory: MemoryScale) -> Painted:
        """A digit in each column in which the amount changes."""
        digits = [str(memory.digit(amount)) for amount in amounts]
        before = ["0", *digits]
        return "".join(" " if digit == last else digit for digit, last in zip(digits, before, strict=False)), ""

    def legend(self, kinds: Iterable[Kind], *, pairs: bool, memory: MemoryScale | None) -> Iterator[list[Painted]]:
        """The entries of the legend."""
        texts = [f"{kind.value} {DATAFLOW[kind].name}" for kind in kinds]
        texts += ["lower case: chunk 1"] if self.chunks == 2 else []
        texts += ["4F0: stage 4, microbatch 0"] if self.chunks > 2 else []
        texts += [f"{self.joint} pair, overlapped"] if pairs else []
        texts += [". idle", *([] if memory is None else [memory.about_digits])]
        yield from ([(text, "")] for text in texts)

    def word(self, action: Action) -> Painted:
        """An action within a text."""
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
        """A piece, exactly `piece.width` columns wide."""
        colour = self._colour(piece.kind, piece.chunk)
        if not piece.is_computation:
            yield BAR * piece.width, colour
            return
        number = piece.action.part
        room = piece.width - 1
        ink = "black" if self.few else INK
        if room:
            yield (number if len(number) <= room else "").center(room), f"{ink} on {colour}"
        yield (JOINT, f"{ink} on {colour}") if piece.joined else (EDGE, colour)

    @property
    def about_mixtures(self) -> str:
        """The sentence that explains columns with several actions."""
        if self.few:
            return "Columns hold several actions and show the colour of one of them, in turn."
        return "Columns hold several actions and show their average colour, greyer where idle."

    def mixture(self, mixture: Mixture, stream: Stream) -> Painted:
        """One column of a lane of `stream`."""
        text = " " if stream is Stream.COMPUTE else BAR
        on = "on " if stream is Stream.COMPUTE else ""
        if self.few:
            if mixture.shown is None:
                return ("\u00b7", "bright_black") if stream is Stream.COMPUTE else (" ", "")
            return text, on + self._colour(*mixture.shown)
        colour, busy = average(mixture.shares, self.chunks)
        return text, on + css(between(colour, IDLE, busy))

    def idle(self, first: int, end: int) -> Painted:
        """Idle time: the columns from `first` to `end`, excluded."""
        return "\u00b7" * (end - first), "bright_black"

    def memory(self, amounts: list[float], memory: MemoryScale) -> Painted:
        """A bar in every column, in eighths of a line."""
        return "".join(EIGHTHS[memory.eighth(amount)] for amount in amounts), self._memory()

    def legend(self, kinds: Iterable[Kind], *, pairs: bool, memory: MemoryScale | None) -> Iterator[list[Painted]]:
        """The entries of the legend."""
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
        """An action within a text."""
        return str(action), self._colour(action.kind, 0)

    def _memory(self) -> str:
        return MEMORY[1] if self.few else MEMORY[0]

    def _colour(self, kind: Kind, chunk: int) -> str:
        """The colour of a kind, mixed with more white for later chunks."""
        if self.few:
            named = hue(kind).terminal
            return f"bright_{named}" if chunk else named
        return shade(kind, chunk, self.chunks)


Painter = Letters | Colours
"""What paints the pieces of a timeline. `space` is the number of empty lines below a rank's memory, so that its bars do
not seem to belong to the next rank."""


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
class Gantt:
    """Draws a timeline with one line per rank, time from left to right, scaled to the width of the terminal. For rich's
    `print`; a notebook shows it as the picture of `svg`.

    With colours, the hue is the kind of action, the shade is the chunk and the number is the microbatch. Without
    colours, letters show the same. What runs beside the computations, such as gradient reductions, has a line of its
    own, named by its stream. Makespan, bubble and peak activations are written below.

    Attributes:
        timeline: the timeline.
        unit, factor: times are written multiplied by `factor` and followed by `unit`. Default: a readable unit for
            timelines in seconds, for which `unit="ms"`
            alone converts.
        memory: whether to draw, below each rank, what it keeps for its backwards: bars or, in plain text, a digit in
            each column in which the amount changes.

    >>> from pipeflow import make_schedule, simulate
    >>> timeline = simulate(make_schedule("1f1b", ranks=2, microbatches=3))
    >>> Console(width=60, color_system=None).print(Gantt(timeline, unit="s"))
    1f1b, 2 ranks, 3 microbatches
            0 s                 5                   10
    rank 0  F0- F1- ........B0----- F2- B1----- ....B2-----
    peak 2  1   2                               1
    rank 1  ....F0- B0----- F1- B1----- F2- B2----- ........
    peak 1      1                                   0
    makespan 12 s  bubble 25.0%  peak activations 2 1
    <BLANKLINE>
    F forward   B backward   . idle   1-2 activations kept
    """

    timeline: Timeline
    unit: str = ""
    factor: float = 1.0
    memory: bool = True

    def _repr_html_(self) -> str:
        return svg(self.timeline, unit=self.unit, factor=self.factor)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unit = Unit.of([self.timeline], self.unit, self.factor)
        return stacked([heading(self.timeline)], [self.timeline], unit, console, options, memory=self.memory)


def stacked(
    titles: Sequence[str],
    timelines: Sequence[Timeline],
    unit: Unit,
    console: Console,
    options: ConsoleOptions,
    *,
    memory: bool,
) -> Iterator[Text]:
    """Timelines one above the other on one time scale, each with its title, with one legend below."""
    timelines = same_memory(timelines)
    painter = painter_for(max(map(num_chunks, timelines)), console, options)
    kept = memory_of(timelines) if memory else None
    margin = max(len(label) for timeline in timelines for label in _labels(timeline, kept)) + 2
    room = max(options.max_width - margin, 1)
    horizon = max(timeline.makespan for timeline in timelines)
    scale = fit(timelines, room)
    for title, timeline in zip(titles, timelines, strict=True):
        yield Text(printable(title), "bold")
        yield _line(" " * margin, (axis(horizon, scale, room, unit), "bright_black"))
        yield from _rows(timeline, scale, margin, painter, kept)
        yield from _flowed(([(part, "")] for part in summary(timeline, unit).split("  ")), options.max_width, gap=2)
        yield Text()
    pairs = any(span.partner is not None for timeline in timelines for span in timeline)
    legend = painter.legend(kinds(timelines), pairs=pairs, memory=kept)
    yield from _flowed(legend, options.max_width)
    drawn = (line for timeline in timelines for rank in pieces(lanes(timeline), scale) for line in rank)
    if any(isinstance(piece, Mixture) for line in drawn for piece in line):
        yield Text(painter.about_mixtures)


def painter_for(chunks: int, console: Console, options: ConsoleOptions) -> Painter:
    """`Colours` if the console has colours, otherwise `Letters`."""
    plain = console.color_system is None or console.no_color or options.ascii_only
    return Letters(chunks) if plain else Colours(chunks, few=console.color_system in ("standard", "windows"))


def _rows(timeline: Timeline, scale: float, margin: int, painter: Painter, kept: MemoryScale | None) -> Iterator[Text]:
    """Per rank, a line for its computations, one for each other stream and, with memory, one for what it keeps."""
    makespan = timeline.makespan
    width = round_half_up(makespan * scale)
    labels = iter(_labels(timeline, kept))
    drawn = lanes(timeline)
    for rank, (of_rank, painted) in enumerate(zip(drawn, pieces(drawn, scale), strict=True)):
        for lane, line in zip(of_rank, painted, strict=True):
            yield _line(next(labels).ljust(margin), *paint(line, width, painter, lane.stream))
        if kept is not None:
            amounts = by_column(timeline.memory(rank), makespan, scale)
            yield _line((next(labels).ljust(margin), "bright_black"), painter.memory(amounts, kept))
            yield from [Text()] * painter.space


def _flowed(items: Iterable[list[Painted]], width: int, *, gap: int = 3) -> Iterator[Text]:
    """The items, `gap` columns apart, in as few lines as possible. No item is split."""
    line = Text()
    for item in items:
        text = Text.assemble(*item)
        if line and len(line) + gap + len(text) > width:
            yield line
            line = Text()
        line = Text.assemble(line, " " * gap * bool(line), text)
    yield line


def _labels(timeline: Timeline, kept: MemoryScale | None) -> Iterator[str]:
    """The label before each line."""
    for rank, of_rank in enumerate(lanes(timeline)):
        yield from (lane.name for lane in of_rank)
        if kept is not None:
            yield f"peak {kept.text(max((amount for _, amount in timeline.memory(rank)), default=0.0))}"


def _line(*parts: str | tuple[str, str]) -> Text:
    line = Text.assemble(*parts, no_wrap=True, overflow="crop")
    last = parts[-1]
    if isinstance(last, str) or not last[1].startswith("on "):  # blanks with a background are visible
        line.rstrip()
    return line


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """Draws two timelines one above the other on the same time scale, each as a `Gantt` with its own measures. For
    rich's `print`.

    Attributes:
        first, second: the timelines, in the same unit of time: simulate the plan under the measured costs.
        unit, factor: times are written multiplied by `factor` and followed by `unit`. Default: a readable unit for
            timelines in seconds.
        titles: words before the two headings.
        memory: whether to draw the memory of each rank.
    """

    first: Timeline
    second: Timeline
    unit: str = ""
    factor: float = 1.0
    titles: tuple[str, str] = ("planned", "measured")
    memory: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timelines = self.first, self.second
        unit = Unit.of(timelines, self.unit, self.factor)
        titles = [f"{title}: {heading(timeline)}" for title, timeline in zip(self.titles, timelines, strict=True)]
        return stacked(titles, timelines, unit, console, options, memory=self.memory)


def picture(timeline: Timeline) -> str:
    """The timeline as text, one line per rank. The shortest span is as wide as its label and a blank, whatever the
    total width, so this is for small schedules with regular costs. `Gantt` scales to a given width.

    The letter is the kind, the number the microbatch, lower case the second chunk, a dot one unit of idle time:

    >>> from pipeflow import make_schedule, simulate
    >>> print(picture(simulate(make_schedule("1f1b", ranks=2, microbatches=2))))
    rank 0  F0 F1 .  .  B0--- .  B1---
    rank 1  .  F0 B0--- F1 B1--- .  .
    """
    unit = shortest([timeline])
    chunks, drawn = num_chunks(timeline), lanes(timeline)
    found = (piece for rank in pieces(drawn, 1 / unit) for line in rank for piece in line)
    labels = [Letters(chunks).label(piece) for piece in found if isinstance(piece, ColumnPiece)]
    columns = max(map(len, labels), default=0) + 1
    painter = Letters(chunks, grid=columns, joint=" ")
    width = round_half_up(timeline.makespan / unit * columns)
    margin = max(len(lane.name) for rank in drawn for lane in rank) + 2
    return "\n".join(
        lane.name.ljust(margin) + "".join(text for text, _ in paint(line, width, painter, lane.stream)).rstrip()
        for rank, painted in zip(drawn, pieces(drawn, columns / unit), strict=True)
        for lane, line in zip(rank, painted, strict=True)
    )
