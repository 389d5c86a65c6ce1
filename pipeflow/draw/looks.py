"""Looks: what the drawings share: colours that all eyes can tell apart, and for files how text is made safe. What must
not live here: geometry, and how a terminal is given its colours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline

Colour = tuple[int, int, int]

COLOURS: dict[Kind, Colour] = {
    Kind.F: (96, 146, 240),
    Kind.B: (40, 170, 100),
    Kind.I: (226, 118, 172),
    Kind.W: (242, 182, 52),
    Kind.R: (125, 50, 230),
}
INK = "#10141c"  # of what is written on blocks, on every ground; on reductions nothing is written


@dataclass(frozen=True, slots=True)
class Scheme:
    """The colours of what is not a block, as CSS writes them."""

    background: str
    lane: str
    grid: str
    text: str
    muted: str
    memory: str
    accent: str


LIGHT = Scheme(
    background="#ffffff",
    lane="#e9edf3",
    grid="#d5dbe3",
    text="#171c26",
    muted="#566072",
    memory="#7c6bb0",
    accent="#c8102e",
)
DARK = Scheme(
    background="#14171d",
    lane="#222732",
    grid="#363d4b",
    text="#e8ebf0",
    muted="#a3adbd",
    memory="#a79bdc",
    accent="#ff5d52",
)


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of a kind of action, mixed with the more white the later the chunk (of `chunks`)."""
    white = 0.55 * chunk / max(chunks - 1, 1)
    return "#{:02x}{:02x}{:02x}".format(*(round(part + (255 - part) * white) for part in COLOURS[kind]))


def kinds(timelines: Iterable[Timeline]) -> list[Kind]:
    """The kinds of action that there are, in their order; what runs beside computations where it takes time."""
    drawn = list(timelines)
    spans = [span for timeline in drawn for span in timeline]
    present = {span.action.kind for span in spans if span.stream is Stream.COMPUTE or span.end > span.start}
    return [kind for kind in Kind if kind in present]


def reduction_time(timeline: Timeline) -> float:
    """The most time that a rank's reductions take."""
    return max((sum(span.end - span.start for span in row) for row in timeline.on(Stream.REDUCE)), default=0.0)


def chunks_of(timeline: Timeline, rank: int) -> dict[int, int]:
    """Per stage that `rank` holds, its chunk."""
    return {stage: chunk for chunk, stage in enumerate(timeline.placement.stages_of(rank))}


def escaped(text: str) -> str:
    """Text for an element or an attribute of HTML or XML; what neither can hold is replaced.

    >>> escaped("<b> & c")
    '&lt;b&gt; &amp; c'
    """
    return escape(_UNWRITABLE.sub("\ufffd", text))


_UNWRITABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def several(timelines: Timeline | Sequence[Timeline]) -> tuple[Timeline, ...]:
    """One timeline or more as a tuple. Raises UsageError when there is none."""
    if isinstance(timelines, Timeline):
        return (timelines,)
    if not timelines:
        raise UsageError("there is nothing to draw: give at least one timeline")
    return tuple(timelines)
