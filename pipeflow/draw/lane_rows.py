"""Lanes: the spans that drawings show, per rank and stream. Must not contain: columns, pixels and colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.span import Row, Span
from pipeflow.core.timeline import Timeline


class Lane(NamedTuple):
    """The spans of one rank on one stream.

    Attributes:
        rank: the rank.
        stream: the stream.
        row: its spans, in order.
        stages: the stages that the rank holds.
    """

    rank: int
    stream: Stream
    row: Row
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        """The rank for its computations, the stream for others."""
        return f"rank {self.rank}" if self.stream is Stream.COMPUTE else self.stream.value

    def chunk(self, span: Span) -> int:
        """The index of a span's stage among the rank's stages."""
        return self.stages.index(span.action.stage)


def all_lanes(timeline: Timeline) -> list[list[Lane]]:
    """Per rank, a lane for its computations, and one for each other stream that anything runs on."""
    streams = dict.fromkeys((Stream.COMPUTE, *timeline.streams))
    rows = zip(*(timeline.on(stream) for stream in streams), strict=True)
    return [
        [Lane(rank, *each, timeline.placement.stages_of(rank)) for each in zip(streams, row, strict=True)]
        for rank, row in enumerate(rows)
    ]


def lanes(timeline: Timeline) -> list[list[Lane]]:
    """The result of `all_lanes` without streams on which nothing takes time, except the computations."""
    ranks = all_lanes(timeline)
    timed = {lane.stream for rank in ranks for lane in rank if any(span.end > span.start for span in lane.row)}
    return [[lane for lane in rank if lane.stream in timed | {Stream.COMPUTE}] for rank in ranks]


def kinds(timelines: Iterable[Timeline]) -> list[Kind]:
    """The kinds of action in the lanes of the timelines, in the order of `Kind`."""
    drawn = [lane for timeline in timelines for rank in lanes(timeline) for lane in rank]
    present = {span.action.kind for lane in drawn for span in lane.row}
    return [kind for kind in Kind if kind in present]


def num_chunks(timeline: Timeline) -> int:
    """The largest number of stages that a rank holds."""
    return max(len(timeline.placement.stages_of(rank)) for rank in range(len(timeline.rows)))


def several(timelines: Timeline | Sequence[Timeline]) -> tuple[Timeline, ...]:
    """One timeline, or a sequence of them, as a tuple. Raises UsageError for an empty sequence."""
    if isinstance(timelines, Timeline):
        return (timelines,)
    if not timelines:
        raise UsageError("there is nothing to draw: give at least one timeline")
    return tuple(timelines)
