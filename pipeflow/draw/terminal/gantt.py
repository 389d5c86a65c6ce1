"""Gantt: a timeline, planned or measured, in a terminal or as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pipeflow.core.text import printable
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import heading, summary
from pipeflow.draw.column_pieces import Mixture, by_column, fit, pieces, round_half_up
from pipeflow.draw.files.svg_timeline import svg
from pipeflow.draw.lane_rows import kinds, lanes, num_chunks
from pipeflow.draw.memory import MemoryScale, memory_of, same_memory
from pipeflow.draw.painters import Colours, Letters, Painted, Painter, paint
from pipeflow.draw.times import Unit, axis


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
