"""Text: how people write numbers, and how text that comes from elsewhere is made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with every character that a terminal could take for a command, or that it cannot show, written as
    `repr` writes it.

    >>> printable("forward \x1b[2J and \u202e back")
    'forward \\x1b[2J and \\u202e back'
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def number(value: float) -> str:
    """Four digits, or all that stand before the point."""
    return f"{value:{'.4g' if abs(value) < 9999.5 else '.0f'}}"


def percent(ratio: float) -> str:
    """A part of the whole, without a sign for what is only rounding."""
    return f"{ratio if abs(ratio) >= 5e-4 else 0.0:.1%}"


def bytes_text(size: float) -> str:
    """A number of bytes: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"
