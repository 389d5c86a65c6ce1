"""Colours that all drawings share: hues of kinds, and schemes of surfaces, that readers with any colour vision can tell
apart. Must not contain: geometry, and how a terminal gets its colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeflow.core.action import Kind

INK = "#10141c"  # colour of text on blocks of computations, in both schemes


RGB = tuple[float, float, float]  # red, green and blue, from 0 to 255


class Hue(NamedTuple):
    """A colour.

    Attributes:
        rgb: red, green and blue, from 0 to 255.
        terminal: the nearest of the 16 colours that every terminal has.
        chrome: the nearest of the colours that chrome://tracing has names for.
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
    Kind.S: Hue((192, 252, 0), "bright_green", "startup"),
    Kind.C: Hue((221, 51, 170), "cyan", "bad"),
    Kind.O: Hue((153, 136, 34), "white", "olive"),
    Kind.L: Hue((0, 150, 160), "cyan", "good"),
    Kind.U: Hue((8, 16, 248), "blue", "rail_response"),
    Kind.H: Hue((0, 0, 64), "white", "black"),
}
SPARE = (  # for kinds that have no hue of their own; these can be told apart as well
    Hue((255, 0, 34), "red", "terrible"),
    Hue((153, 136, 34), "white", "olive"),
)


def hue(kind: Kind) -> Hue:
    """The colour of a kind of action."""
    if kind in HUES:
        return HUES[kind]
    others = [each for each in Kind if each not in HUES]
    return SPARE[others.index(kind) % len(SPARE)]


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of a kind of action as CSS writes it. Later chunks (of `chunks`) are mixed with more white."""
    return mixed(hue(kind), chunk, chunks)


def mixed(hue: Hue, chunk: int, chunks: int) -> str:
    """A colour, with the white of its chunk, as CSS writes it."""
    white = 0.55 * chunk / max(chunks - 1, 1)
    return css(between((255, 255, 255), hue.rgb, white))


def average(shares: Iterable[tuple[tuple[Kind, int], float]], chunks: int) -> tuple[RGB, float]:
    """The mean colour of a column in which each kind and chunk has a share, and the sum of the shares, at most 1. The
    rest of the column is idle.
    """
    sums, whole = [0.0, 0.0, 0.0], 0.0
    for (kind, chunk), share in shares:
        colour = bytes.fromhex(shade(kind, chunk, chunks)[1:])
        sums = [total + share * part for total, part in zip(sums, colour, strict=True)]
        whole += share
    red, green, blue = (total / (whole or 1.0) for total in sums)
    return (red, green, blue), min(whole, 1.0)


def between(colour: RGB, other: RGB, part: float) -> RGB:
    """A mixture of two colours: `part` of the first, the rest of the second."""
    red, green, blue = (part * one + (1 - part) * two for one, two in zip(colour, other, strict=True))
    return red, green, blue


def css(colour: RGB) -> str:
    """A colour as CSS writes it."""
    return "#{:02x}{:02x}{:02x}".format(*map(round, colour))


class Scheme(NamedTuple):
    """The colours of everything that is not a block, as CSS writes them."""

    background: str
    lane: str
    grid: str
    text: str
    muted: str
    memory: str
    accent: str


LIGHT = Scheme("#ffffff", "#e9edf3", "#d5dbe3", "#171c26", "#566072", memory="#7c6bb0", accent="#c8102e")
DARK = Scheme("#14171d", "#222732", "#363d4b", "#e8ebf0", "#a3adbd", memory="#a79bdc", accent="#ff5d52")
