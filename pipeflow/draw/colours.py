"""Colours: what the drawings share: hues of kinds and schemes of surfaces that all eyes can tell apart. What must not
live here: geometry, and how a terminal is given its colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeflow.core.action import Kind

INK = "#10141c"  # of what is written on blocks of computations, on every ground


RGB = tuple[float, float, float]  # red, green and blue, from 0 to 255


class Hue(NamedTuple):
    """A colour as red, green and blue; and the nearest of the 16 that every terminal has, and of those that
    chrome://tracing has names for.
    """

    rgb: tuple[int, int, int]
    terminal: str
    chrome: str


HUES = {
    Kind.F: Hue((96, 146, 240), "blue", "rail_response"),
    Kind.B: Hue((40, 170, 100), "green", "rail_load"),
    Kind.I: Hue((226, 118, 172), "magenta", "detailed_memory_dump"),
    Kind.W: Hue((242, 182, 52), "yellow", "rail_idle"),
    Kind.R: Hue((125, 50, 230), "red", "rail_animation"),
}
SPARE = (  # for kinds that have none of their own: told apart by all eyes, too
    Hue((255, 0, 34), "cyan", "terrible"),
    Hue((153, 136, 34), "white", "olive"),
    Hue((221, 51, 170), "red", "bad"),
)


def hue(kind: Kind) -> Hue:
    """The colour of a kind of action."""
    if kind in HUES:
        return HUES[kind]
    others = [each for each in Kind if each not in HUES]
    return SPARE[others.index(kind) % len(SPARE)]


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of a kind of action, mixed with the more white the later the chunk (of `chunks`)."""
    return mixed(hue(kind), chunk, chunks)


def mixed(hue: Hue, chunk: int, chunks: int) -> str:
    """A colour with the white of a chunk, as CSS writes it."""
    white = 0.55 * chunk / max(chunks - 1, 1)
    return css(between((255, 255, 255), hue.rgb, white))


def average(shares: Iterable[tuple[tuple[Kind, int], float]], chunks: int) -> tuple[RGB, float]:
    """Of kinds and chunks with their parts of a column: the mean of their colours, and the part that they have
    together, at most 1; the rest is idle.
    """
    sums, whole = [0.0, 0.0, 0.0], 0.0
    for (kind, chunk), share in shares:
        colour = bytes.fromhex(shade(kind, chunk, chunks)[1:])
        sums = [total + share * part for total, part in zip(sums, colour, strict=True)]
        whole += share
    red, green, blue = (total / (whole or 1.0) for total in sums)
    return (red, green, blue), min(whole, 1.0)


def between(colour: RGB, other: RGB, part: float) -> RGB:
    """`part` of a colour, and the rest of another one."""
    red, green, blue = (part * one + (1 - part) * two for one, two in zip(colour, other, strict=True))
    return red, green, blue


def css(colour: RGB) -> str:
    """A colour as CSS writes it."""
    return "#{:02x}{:02x}{:02x}".format(*map(round, colour))


class Scheme(NamedTuple):
    """The colours of what is not a block, as CSS writes them."""

    background: str
    lane: str
    grid: str
    text: str
    muted: str
    memory: str
    accent: str


_COLOURS = {  # on a light ground, and on a dark one
    "background": ("#ffffff", "#14171d"),
    "lane": ("#e9edf3", "#222732"),
    "grid": ("#d5dbe3", "#363d4b"),
    "text": ("#171c26", "#e8ebf0"),
    "muted": ("#566072", "#a3adbd"),
    "memory": ("#7c6bb0", "#a79bdc"),
    "accent": ("#c8102e", "#ff5d52"),
}
LIGHT = Scheme(**{name: light for name, (light, _) in _COLOURS.items()})
DARK = Scheme(**{name: dark for name, (_, dark) in _COLOURS.items()})
