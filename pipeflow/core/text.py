"""Text: numbers as people write them, and text from elsewhere made safe for a terminal."""

from __future__ import annotations


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
