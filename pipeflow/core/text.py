"""Text that comes from elsewhere, for a terminal. What must not live here: how files write text."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with every character that a terminal could take for a command, or that it cannot show, written as
    `repr` writes it.

    >>> printable("forward \x1b[2J and \u202e back")
    'forward \\x1b[2J and \\u202e back'
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
