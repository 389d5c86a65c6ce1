"""Timelines in a terminal or as plain text: one, two on one time scale, and a small one in a fixed form for docstrings
and messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pipeflow.core.text import printable
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import MemoryScale, Unit, axis, heading, memory_of, same_memory, summary
from pipeflow.draw.lane_times import (
    ColumnPiece,
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
from pipeflow.draw.painters import Colours, Letters, Painted, Painter, paint
from pipeflow.draw.svg_timeline import svg


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
