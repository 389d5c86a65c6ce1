"""Text: numbers as people write them, text from elsewhere made safe for a terminal, and what a notebook shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

PER_SECOND = {"h": 1 / 3600, "min": 1 / 60, "s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""How many of each unit are a second."""


def printable(text: str) -> str:
    r"""The text with every character that a terminal could take for a command, or cannot show, written as `repr` writes
    it.

    >>> printable("forward \x1b[2J and \u202e back")
    'forward \\x1b[2J and \\u202e back'
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def number(value: float) -> str:
    """A number with four significant digits, or with all digits before the decimal point."""
    return f"{value:{'.4g' if abs(value) < 9999.5 else '.0f'}}"


def seconds_text(seconds: float) -> str:
    """A time in the largest of s, ms and us in which it is at least 1, such as `83.6 s` or `1.5 ms`. Less than a
    nanosecond is `0 s`.
    """
    size = abs(seconds) / 0.99995  # what four digits round to 1000 ms is 1 s
    if abs(seconds) < 1e-9 or size >= 1:
        return f"{number(seconds if size >= 1 else 0.0)} s"
    return f"{number(seconds * 1e3)} ms" if size >= 1e-3 else f"{number(seconds * 1e6)} us"


def percent(ratio: float) -> str:
    """A share as a percentage. A value that differs from 0 only by rounding is written without a sign."""
    return f"{ratio if abs(ratio) >= 5e-4 else 0.0:.1%}"


def bytes_text(size: float) -> str:
    """A number of bytes with a binary unit, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"


def count_text(count: int) -> str:
    """A count as people write it, such as `175B`."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= (unit if unit == 1e3 else 0.9995 * unit):  # what is written as 1000k is 1M
            return f"{count / unit:.3g}{name}" if count < 999.5 * unit else f"{count / unit:.0f}{name}"
    return str(count)


def listed(names: Sequence[str], word: str = "and") -> str:
    """The names as text, as in "F, I and W"; `word` stands before the last one."""
    return f" {word} ".join([", ".join(names[:-1])] * (len(names) > 1) + [*names[-1:]])


def aligned(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of plain text. The first column is aligned on the left, the others on the right; titles may
    have several lines.
    """
    tall = max(title.count("\n") + 1 for title in titles)
    heads = [[""] * (tall - title.count("\n") - 1) + title.split("\n") for title in titles]
    lines = [*zip(*heads, strict=True), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = widths
    return [
        "  ".join(
            [line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], others, strict=True))]
        ).rstrip()
        for line in lines
    ]


class Shown:
    """A value that a notebook shows as a picture: HTML or SVG, or text if there is no picture.

    Attributes:
        drawing: draws a value, as a static method: returns HTML or SVG, or None for text.
    """

    __slots__ = ()
    drawing: ClassVar[Callable[[Any], str | None] | None] = None

    def _repr_html_(self) -> str | None:
        draw = type(self).drawing
        return None if draw is None else draw(self)
