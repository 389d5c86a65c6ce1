from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest

from pipeflow.core.action import Kind
from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import Unit
from pipeflow.draw.colours import INK
from pipeflow.draw.page.timeline_data import MODES, MOST, palettes
from pipeflow.draw.page.timeline_page import parts
from tests.draw.samples import planned, reducing

COMPUTING = Kind.F, Kind.B, Kind.I, Kind.W


def linear(colour: str) -> list[float]:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""
    high, low = sorted((0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other))), reverse=True)
    return (high + 0.05) / (low + 0.05)


def oklab(colour: str) -> tuple[float, float, float]:
    """In a space where distances are differences that people see (Ottosson, 2020)."""
    red, green, blue = linear(colour)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


@pytest.mark.parametrize("mode", ["chunk", "microbatch"])
@pytest.mark.parametrize("kind", COMPUTING)
def test_numbers_can_be_read_on_every_colour(mode: str, kind: Kind) -> None:
    assert min(contrast(colour, INK) for colour in palettes(kind, 8, 1024)[mode]) > 4.5


def test_microbatches_can_be_told_apart() -> None:
    colours = palettes(Kind.F, 1, 1024)["microbatch"]
    assert len(set(colours)) == MOST == 64
    points = [*map(oklab, colours)]
    assert min(math.dist(*pair) for pair in combinations(points, 2)) > 0.015
    assert min(math.dist(*pair) for pair in pairwise([*points, points[0]])) > 0.15


def test_chunks_can_be_told_apart_and_so_can_their_kinds() -> None:
    for kind in COMPUTING:
        points = [*map(oklab, palettes(kind, 8, 1)["chunk"])]
        assert min(math.dist(*pair) for pair in combinations(points, 2)) > 0.02
    for chunk in range(8):
        points = [oklab(palettes(kind, 8, 1)["chunk"][chunk]) for kind in (Kind.F, Kind.I, Kind.W)]
        assert min(math.dist(*pair) for pair in combinations(points, 2)) > 0.02


def test_a_reduction_belongs_to_no_microbatch() -> None:
    assert len(palettes(Kind.R, 2, 8)["microbatch"]) == 1


@pytest.mark.parametrize("timeline", [planned(), planned("interleaved-1f1b", chunks=3), reducing()])
def test_every_mode_has_a_legend_of_the_colours_that_it_shows(timeline: Timeline) -> None:
    made = parts((timeline,), Unit())
    for mode in MODES:
        entries = [line for line in made.legend.splitlines() if f'class="by-{mode}' in line]
        kinds = {letter for row in made.data["timelines"][0]["rows"] for letter in row["actions"] if letter.isalpha()}
        used = {colour for letter in kinds for colour in made.data["kinds"][letter]["colours"][mode]}
        assert all(any(colour in entry for entry in entries) for colour in used)


def test_the_legend_of_a_v_says_which_way_its_chunks_go() -> None:
    ways = ["darker: chunk 0 (down), lighter: chunk 1 (up)", "chunk 0 (down)", "chunk 1 (up)"]
    both = (planned("zb-v"), planned("1f1b"))
    for timelines in (both[:1], both):
        legend = parts(timelines, Unit()).legend
        assert all(way in legend for way in ways)
    looped = parts((planned("zb-v"), planned("interleaved-1f1b", chunks=2)), Unit()).legend
    assert "lighter: later chunk" in looped
    assert "(down)" not in looped
