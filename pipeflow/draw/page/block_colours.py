"""Palettes: the colours of blocks by kind, by chunk or by microbatch, and the legends. Must not contain: geometry."""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Iterator
from functools import lru_cache

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import DATAFLOW, PASSING, Stream
from pipeflow.core.timeline import Timeline
from pipeflow.draw.colours import RGB, between, css, shade
from pipeflow.draw.lane_rows import kinds, num_chunks

MODES = "kind", "chunk", "microbatch"  # what colours can stand for
MOST = 64  # colours of microbatches; then they begin again
WHITE = (255.0, 255.0, 255.0)
HUES = 16
TURN = 7  # hues from one number to the next, which are far apart; all hues come before the first one comes again
LUMINANCES = 0.5, 0.25, 0.72, 0.36  # in turn; text in the ink has a contrast of at least 5 on all of them
LIGHTER = 0.0, 0.3, 0.52  # the white in what begins a microbatch, in what passes it back, and in the rest


def palettes(kind: Kind, chunks: int, microbatches: int) -> dict[str, list[str]]:
    """Per mode, the colours of a kind of action: one per chunk, or one per microbatch of which `MOST` differ."""
    own = [shade(kind, chunk, chunks) for chunk in range(chunks)]
    if DATAFLOW[kind].stream is not Stream.COMPUTE:  # a reduction belongs to no microbatch
        return {"kind": own, "chunk": own, "microbatch": own[:1]}
    return {
        "kind": own,
        "chunk": [css(between(WHITE, _varied(chunk % HUES, 1), LIGHTER[_part(kind)])) for chunk in range(chunks)],
        "microbatch": [css(_varied(number, 4)) for number in range(min(microbatches, MOST))],
    }


def legend(timelines: tuple[Timeline, ...]) -> Iterator[tuple[str, str]]:
    """The entries for the colours of blocks as HTML, each with its mode."""
    chunks = max(map(num_chunks, timelines))
    present = kinds(timelines)
    for kind in present:
        yield "kind", _entry(kind, [shade(kind, chunk, chunks) for chunk in range(chunks)], DATAFLOW[kind].name)
    if chunks > 1:
        yield "kind", "lighter: later chunk"
    computing = [kind for kind in present if DATAFLOW[kind].stream is Stream.COMPUTE]
    beside = [kind for kind in present if kind not in computing]
    microbatches = max(timeline.num_microbatches for timeline in timelines)
    of_chunks = [palettes(kind, chunks, 1)["chunk"] for kind in computing]
    for chunk in range(chunks):
        yield "chunk", f"{_swatches([colours[chunk] for colours in of_chunks])} chunk {chunk}"
    yield "chunk", ", ".join(DATAFLOW[kind].name for kind in computing)
    few = min(microbatches, 16)
    if computing:
        names = f"microbatches 0 to {few - 1}" if few > 1 else "microbatch 0"
        yield "microbatch", f"{_swatches(palettes(Kind.F, 1, few)['microbatch'])} {names}"
    if microbatches > MOST:
        yield "microbatch", f"the same colour again after {MOST}"
    for mode in ("chunk", "microbatch"):
        for kind in beside:
            yield mode, _entry(kind, palettes(kind, chunks, 1)[mode], DATAFLOW[kind].name)


def _entry(kind: Kind, colours: list[str], name: str) -> str:
    low = "" if DATAFLOW[kind].stream is Stream.COMPUTE else ' class="beside"'
    return f"{_swatches(colours, low)} {name}"


def _swatches(colours: list[str], attribute: str = "") -> str:
    return "".join(f'<i{attribute} style="background:{colour}"></i>' for colour in colours)


def _part(kind: Kind) -> int:
    """0 for what passes on activations, 1 for what passes on gradients, 2 for the rest."""
    steps = [PASSING[content] for content, _ in DATAFLOW[kind].makes if content in PASSING]
    return 2 if not steps else 0 if max(steps) > 0 else 1


@lru_cache(4 * HUES)
def _varied(number: int, levels: int) -> RGB:
    """The colour of a number. Neighbours differ in hue, and in luminance if there are several levels of it."""
    aim = LUMINANCES[(number + number // HUES) % levels]
    red, green, blue = colorsys.hsv_to_rgb((9.5 + number * TURN) % HUES / HUES, 0.8, 1.0)
    pale = _mixed_until((red, green, blue), (1.0, 1.0, 1.0), lambda colour: _luminance(colour) >= aim)
    red, green, blue = _mixed_until(pale, (0.0, 0.0, 0.0), lambda colour: _luminance(colour) <= aim)
    return red * 255, green * 255, blue * 255


def _mixed_until(colour: RGB, other: RGB, enough: Callable[[RGB], bool]) -> RGB:
    """A colour mixed with as little of another one as is enough."""
    steps = (between(other, colour, percent / 100) for percent in range(101))
    return next(filter(enough, steps))


def _luminance(colour: RGB) -> float:
    """The relative luminance of a colour whose parts are from 0 to 1, as WCAG defines it."""
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
