"""pixels: timelines as an image without text, for programs that show images. Must not contain: the format of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeflow.core.dataflow import Stream
from pipeflow.core.timeline import Timeline
from pipeflow.draw.colours import LIGHT, RGB, average, between, css, shade
from pipeflow.draw.lane_times import Mixture, fit, heights, lanes, num_chunks, pieces, round_half_up, several

GAP = 16  # pixels between two timelines
LANE: RGB = (*bytes.fromhex(LIGHT.lane[1:]),)


class Pixels(NamedTuple):
    """An image.

    Attributes:
        width, height: its size in pixels.
        rgb: three bytes per pixel, row after row from the top.
    """

    width: int
    height: int
    rgb: bytearray


def pixels(timelines: Timeline | Sequence[Timeline], width: int = 1000) -> Pixels:
    """The timelines one above the other on one time scale, as an image `width` pixels wide: a lane per rank, and a
    lower one for each stream beside its computations. The hue is the kind of action, the shade the chunk. Idle time has
    the colour of an empty lane.

    Raises UsageError for an empty sequence of timelines.
    """
    drawn = several(timelines)
    scale = fit(drawn, width)
    strips: list[bytes] = []
    for timeline in drawn:
        strips += [_blank(width)] * (GAP if strips else 0)
        strips += _strips(timeline, width, scale)
    return Pixels(width, len(strips), bytearray().join(strips))


def _strips(timeline: Timeline, width: int, scale: float) -> list[bytes]:
    """The rows of pixels of one timeline."""
    ranks, chunks = lanes(timeline), num_chunks(timeline)
    size = heights(len(ranks))
    rows: list[bytes] = []
    end = round_half_up(timeline.makespan * scale)
    for rank, painted in zip(ranks, pieces(ranks, scale), strict=True):
        rows += [_blank(width)] * (size.gap if rows else 0)
        for lane, line in zip(rank, painted, strict=True):
            row = bytearray(_bytes(LIGHT.lane) * end + _bytes(LIGHT.background) * (width - end))
            for piece in line:
                if isinstance(piece, Mixture):
                    colour, busy = average(piece.shares, chunks)
                    mixed = css(between(colour, LANE, busy))
                    row[3 * piece.first : 3 * piece.end] = _bytes(mixed)
                    continue
                gap = int(piece.width > 3 and not piece.joined)  # so that two blocks do not look like one
                row[3 * piece.first : 3 * (piece.end - gap)] = _bytes(shade(piece.kind, piece.chunk, chunks)) * (
                    piece.width - gap
                )
            rows += [bytes(row)] * (size.lane if lane.stream is Stream.COMPUTE else size.beside)
    return rows


def _blank(width: int) -> bytes:
    return _bytes(LIGHT.background) * width


def _bytes(colour: str) -> bytes:
    """The three bytes of a colour that is written as in CSS."""
    return bytes.fromhex(colour[1:])
