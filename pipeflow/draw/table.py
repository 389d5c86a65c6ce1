"""Table: rows of numbers under titles, the best of each column marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

BEST = "bold green"


@final
@dataclass(frozen=True, slots=True)
class Table:
    """The first column is text, the others are numbers as text. `best` holds the (row, column) of cells that are
    marked: with a star everywhere, and in colour where there is colour. A title may have several lines.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(zip(self.titles, *self.rows, strict=True))
        widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
        stacked = [title.split("\n") for title in self.titles]
        tall = max(map(len, stacked))
        for cells in zip_longest(*([""] * (tall - len(title)) + title for title in stacked)):
            yield _line([(text, "bold") for text in cells], widths, ["", *" " * (len(cells) - 1)])
        for index, row in enumerate(self.rows):
            marked = [(index, column) in self.best for column in range(len(row))]
            styled = [(text, BEST if mark else "") for text, mark in zip(row, marked, strict=True)]
            yield _line(styled, widths, ["", *("*" if mark else " " for mark in marked[1:])])


def _line(cells: list[tuple[str, str]], widths: list[int], marks: list[str]) -> Text:
    line = Text(no_wrap=True, overflow="ignore")
    for column, ((text, style), width, mark) in enumerate(zip(cells, widths, marks, strict=True)):
        padded = f"  {text:>{width}}" if column else f"{text:{width}}"
        line.append(padded.removesuffix(text) if column else "")
        line.append(text + mark if column else padded, style)
    line.rstrip()
    return line
