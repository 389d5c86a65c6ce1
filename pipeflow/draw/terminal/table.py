"""Table: rows of numbers under titles, with the best of each column marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pipeflow.core.text import printable

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
            yield _line([(head, widths[column], "bold", "") for head, column in zip(heads, group, strict=True)])
        for index, row in enumerate(self.rows):
            marks = [(BEST, "*") if (index, column) in self.best else ("", "") for column in group]
            yield _line([(row[column], widths[column], *mark) for column, mark in zip(group, marks, strict=True)])


def _groups(widths: list[int], room: int) -> list[list[int]]:
    """The columns that are drawn beside each other: the first one, and as many others as fit."""
    groups: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        taken = widths[0] + sum(GAP + widths[other] for other in groups[-1][1:])
        if len(groups[-1]) > 1 and taken + GAP + widths[column] > room:
            groups.append([0])
        groups[-1].append(column)
    return groups


def _line(cells: list[tuple[str, int, str, str]]) -> Text:
    """A line of cells (text, width, style, mark): the first aligned left, the others right."""
    (first, width, style, _), *others = cells
    line = Text(no_wrap=True, overflow="ignore").append(first.ljust(width), style)
    for text, width, style, mark in others:
        line.append(" " * (GAP - 1 + width - len(text))).append(text, style).append(mark or " ", style)
    line.rstrip()
    return line
