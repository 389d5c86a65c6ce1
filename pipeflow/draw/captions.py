"""Captions: the words above and below a drawing."""

from __future__ import annotations

from pipeflow.analysis.measures import stream_times
from pipeflow.core.text import percent
from pipeflow.core.timeline import Timeline
from pipeflow.draw.lane_rows import num_chunks
from pipeflow.draw.times import Unit


def heading(timeline: Timeline) -> str:
    """The name and the size of a timeline, such as "1f1b, 4 ranks, 8 microbatches"."""
    sizes = {
        "rank": len(timeline.rows),
        "chunk": num_chunks(timeline),
        "microbatch": timeline.num_microbatches,
    }
    if sizes["chunk"] == 1:
        del sizes["chunk"]
    return ", ".join([timeline.name, *(_count(number, word) for word, number in sizes.items())])


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{'' if number == 1 else plural}"


def summary(timeline: Timeline, unit: Unit) -> str:
    """The measures of a timeline in one line, two blanks apart: makespan, bubble and peak activations. The span and its
    bubble are added if the span is not the makespan. If anything runs beside the computations, so are the most time
    that a rank spends on each of those streams, and the exposed time.
    """
    parts = [f"makespan {unit.text(timeline.makespan)}"]
    if unit.text(timeline.span) != unit.text(timeline.makespan):
        parts.append(f"span {unit.text(timeline.span)}")
    if beside := [f"{stream} {unit.text(time)}" for stream, time in stream_times(timeline).items()]:
        parts.append(", ".join([*beside, f"exposed {unit.text(timeline.exposed)}"]))
    parts.append(f"bubble {percent(timeline.makespan_bubble_ratio)}")
    if unit.text(timeline.span) != unit.text(timeline.makespan):
        parts.append(f"bubble of span {percent(timeline.bubble_ratio)}")
    parts.append(f"peak activations {_peaks(timeline.peak_activations)}")
    return "  ".join(parts)


def _peaks(peaks: tuple[float, ...]) -> str:
    if len(set(peaks)) == 1:
        return f"{peaks[0]:.4g} on every rank"
    if len(peaks) <= 8:
        return " ".join(f"{peak:.4g}" for peak in peaks)
    most, least = peaks.index(max(peaks)), peaks.index(min(peaks))
    return f"{peaks[most]:.4g} (rank {most}) to {peaks[least]:.4g} (rank {least})"
