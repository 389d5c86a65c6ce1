"""Ties: which layouts are about as fast as others, and which of them are plainer. Must not contain: what layouts
cost, and the search for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeflow.planning.layout import Layout

TIE = 0.02
"""Steps whose times differ by less than this share are ties: the error of the cost model is no smaller. They are sorted
by time nevertheless; `plainest` is the one to recommend."""

RECOMPUTATION = ("none", "selective", "op", "full")  # the least first
KINDS = ("tensor", "pipeline", "context", "expert")  # of ranks that share a model; replicas are plain

Timed = tuple[float, Layout]


def ranking(timed: Iterable[Timed]) -> list[Timed]:
    """Layouts with the seconds of their steps, the fastest first. Of equal times, the plainest one comes first."""
    return sorted(timed, key=lambda each: (each[0], plainness(each[1])))


def plainest(timed: Iterable[Timed]) -> Timed:
    """The plainest layout among those within TIE of the fastest."""
    every = ranking(timed)
    return min((each for each in every if each[0] <= every[0][0] * (1 + TIE)), key=lambda each: plainness(each[1]))


def plainness(layout: Layout) -> tuple[int, ...]:
    """A sort key: the plainer layout has fewer slices of sequences, then fewer kinds of ranks beside replicas. Of as
    many, it has 1F1B or no pipeline, then fewer stages per rank, less recomputation, and less that is divided among
    replicas. Then it has fewer tensor, pipeline, context and expert ranks. Of the same sizes, fewer replicas divide the
    weights: collectives of fewer ranks suffer less from a loaded network, which plans do not know.
    """
    kinds = sum(getattr(layout, name) > 1 for name in KINDS)
    again = RECOMPUTATION.index(layout.checkpoint)
    sizes = (getattr(layout, name) for name in KINDS)
    return (
        _slices(layout),
        kinds,
        not _is_usual(layout),
        _stages(layout),
        again,
        max(1, layout.zero),
        *sizes,
        layout.setup.shards,
    )


def plainer(layout: Layout, than: Layout) -> Iterator[str]:
    """What makes a layout plainer than another one, in a few words each.

    >>> from pipeflow import Setup
    >>> one = Layout(Setup(), 2, 8, "1f1b", {}, ((0, 2), (2, 4)))
    >>> other = Layout(Setup(tensor=2, checkpoint="full"), 1, 8, "1f1b", {}, ((0, 4),))
    >>> list(plainer(one, other)), list(plainer(other, one))
    (['no tensor ranks', 'no recomputation'], ['no pipeline'])
    """
    if (mine := _slices(layout)) < (theirs := _slices(than)):
        yield "whole sequences" if mine == 1 else f"{mine} slices, not {theirs}"
    for name in KINDS:
        mine, theirs = getattr(layout, name), getattr(than, name)
        if mine < theirs:
            alone = "no pipeline" if name == "pipeline" else f"no {name} ranks"
            yield alone if mine == 1 else f"{mine} {name} ranks, not {theirs}"
    if _is_usual(layout) and not _is_usual(than) and layout.pipeline > 1:
        yield f"the schedule {layout.schedule}"
    if (mine := _stages(layout)) < (theirs := _stages(than)) and layout.pipeline > 1:
        yield f"{mine} stage{'s' * (mine > 1)} per rank, not {theirs}"
    if RECOMPUTATION.index(layout.checkpoint) < RECOMPUTATION.index(than.checkpoint):
        yield "no recomputation" if layout.checkpoint == "none" else "less recomputation"
    if max(1, layout.zero) < than.zero:
        yield f"ZeRO-{layout.zero}" if layout.zero else "no ZeRO"
    is_alike = layout.zero == than.zero and layout.setup.replicas == than.setup.replicas
    if is_alike and (mine := layout.setup.shards) < (theirs := than.setup.shards):
        yield f"ZeRO-{layout.zero} over {mine} replicas, not {theirs}"


def _is_usual(layout: Layout) -> bool:
    return layout.pipeline == 1 or layout.schedule == "1f1b"


def _slices(layout: Layout) -> int:
    """Into how many slices microbatches are cut."""
    return int(layout.options.get("slices", 1))


def _stages(layout: Layout) -> int:
    """The number of stages of a rank."""
    return len(layout.cut) // layout.pipeline
