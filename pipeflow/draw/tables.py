"""Measures in a terminal: rows of numbers under titles, with the best of each column marked, and named points on two
axes, where less is better on both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pipeflow.core.text import printable
from pipeflow.draw.plane import Axis, Point, front, place_labels, share

BEST = "bold green"
GAP = 2  # columns between two cells, including the mark of the first


@final
@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column is text and whose other columns are numbers. For rich's `print`. Columns that do not
    fit the width are drawn below, with the first column again.

    Attributes:
        titles: the title of each column; it may have several lines.
        rows: the cells, as text.
        best: the (row, column) of the cells to mark: with a star, and in colour if there are colours.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        titles = ["\n".join(map(printable, title.split("\n"))) for title in self.titles]
        yield from replace(self, titles=titles, rows=[[*map(printable, row)] for row in self.rows])._drawn(options)

    def _drawn(self, options: ConsoleOptions) -> Iterator[Text]:
        columns = list(zip(self.titles, *self.rows, strict=True))
        widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
        for number, group in enumerate(_groups(widths, options.max_width)):
            yield from [Text()] * bool(number)
            yield from self._block(group, widths)

    def _block(self, group: list[int], widths: list[int]) -> Iterator[Text]:
        """The columns of `group`, titles first."""
        titles = [self.titles[column].split("\n") for column in group]
        tall = max(map(len, titles))
        for heads in zip(*([""] * (tall - len(title)) + title for title in titles), strict=True):
            yield _table_line([(head, widths[column], "bold", "") for head, column in zip(heads, group, strict=True)])
        for index, row in enumerate(self.rows):
            marks = [(BEST, "*") if (index, column) in self.best else ("", "") for column in group]
            yield _table_line([(row[column], widths[column], *mark) for column, mark in zip(group, marks, strict=True)])


def _groups(widths: list[int], room: int) -> list[list[int]]:
    """The columns that are drawn beside each other: the first one, and as many others as fit."""
    groups: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        taken = widths[0] + sum(GAP + widths[other] for other in groups[-1][1:])
        if len(groups[-1]) > 1 and taken + GAP + widths[column] > room:
            groups.append([0])
        groups[-1].append(column)
    return groups


def _table_line(cells: list[tuple[str, int, str, str]]) -> Text:
    """A line of cells (text, width, style, mark): the first aligned left, the others right."""
    (first, width, style, _), *others = cells
    line = Text(no_wrap=True, overflow="ignore").append(first.ljust(width), style)
    for text, width, style, mark in others:
        line.append(" " * (GAP - 1 + width - len(text))).append(text, style).append(mark or " ", style)
    line.rstrip()
    return line


@final
@dataclass(frozen=True, slots=True)
class Scatter:
    """Draws named points, as high as needed to name all of them. Points at one place share it. Pareto-optimal points
    are marked. For rich's `print`.

    Attributes:
        points: the points.
        x, y: the axes.
    """

    points: Sequence[Point]
    x: Axis
    y: Axis

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = console.color_system is None or console.no_color or options.ascii_only
        marks = ("*", "o") if plain else ("\u25cf", "\u25cf")
        lines: list[Text] = []
        safe = replace(self, points=[point._replace(name=printable(point.name)) for point in self.points])
        for height in (14, 18, 24, 32):
            lines, nameless = safe._plotted(min(options.max_width, 110), height, marks)
            if not nameless:
                break
        yield Text.assemble((f"{self.y.title} against {self.x.title}", "bold"))
        yield from lines
        yield Text.assemble((marks[0], FRONT), " Pareto-optimal   ", (marks[1], REST), " dominated", no_wrap=True)
        if nameless:
            yield Text(f"without a name: {', '.join(nameless)}")

    def _plotted(self, width: int, height: int, marks: tuple[str, str]) -> tuple[list[Text], list[str]]:
        """The plot, `height` rows high, and the names that have no room in it."""
        ticks = self.y.ticks([point.y for point in self.points], height // 2)
        across = self.x.ticks([point.x for point in self.points], width // 12)
        margin = max(len(self.y.text(tick)) for tick in ticks) + 2
        columns = width - margin - 2
        best = {point.name for point in front(self.points)}

        def cell(point: Point) -> tuple[int, int]:
            return round(share(point.x, across) * (columns - 1)), round((1 - share(point.y, ticks)) * (height - 1))

        places: dict[tuple[int, int], list[str]] = {}
        for point in sorted(self.points, key=lambda point: point.name not in best):
            places.setdefault(cell(point), []).append(point.name)
        names = [", ".join(together) for together in places.values()]
        centres = [(column + 0.5, row + 0.5) for column, row in places]
        labels = place_labels(centres, [(len(name), 1) for name in names], (1.5, 1), (0, 0, columns, height))
        canvas = [Text(" " * columns, no_wrap=True, overflow="crop") for _ in range(height)]
        nameless = []
        for (column, row), name, together, label in zip(places, names, places.values(), labels, strict=True):
            on_front = not best.isdisjoint(together)
            _put(canvas[row], column, marks[not on_front], FRONT if on_front else REST)
            if label is None:
                nameless += together
            else:
                _put(canvas[math.floor(label.box[1])], math.ceil(label.box[0]), name, "bold" if on_front else "")
        return [*self._framed(canvas, ticks, margin), *self._below(across, margin, columns)], nameless

    def _framed(self, canvas: list[Text], ticks: list[float], margin: int) -> Iterator[Text]:
        named = {round((1 - share(tick, ticks)) * (len(canvas) - 1)): self.y.text(tick) for tick in ticks}
        for row, line in enumerate(canvas):
            framed = Text.assemble((f"{named.get(row, ''):>{margin - 2}} |", "bright_black"), line, no_wrap=True)
            framed.rstrip()
            yield framed

    def _below(self, ticks: list[float], margin: int, columns: int) -> Iterator[Text]:
        yield Text(" " * (margin - 1) + "+" + "-" * columns, "bright_black", no_wrap=True)
        line = ""
        for tick in ticks:
            text = self.x.text(tick)
            column = round(share(tick, ticks) * (columns - 1)) - len(text) // 2
            column = margin + min(column, columns - len(text))
            if column > len(line):
                line = line.ljust(column) + text
        yield Text(line, "bright_black", no_wrap=True)


FRONT, REST = "bold green", "blue"


def _put(line: Text, column: int, text: str, style: str) -> None:
    """Overwrites a line with `text` from `column` on."""
    head, rest = line[:column], line[column + len(text) :]
    line.plain = ""
    line.append_text(head).append(text, style).append_text(rest)
