"""What stands around a drawing: the time axis above it, the measures below it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.analysis.causes import critical_path
from pipeflow.core.dataflow import Stream
from pipeflow.core.text import number, percent
from pipeflow.core.timeline import Timeline
from pipeflow.draw.layout import num_chunks, round_half_up
from pipeflow.draw.looks import reduction_time


@dataclass(frozen=True, slots=True)
class Unit:
    """How times are written: multiplied by `factor`, then followed by `name`."""

    name: str = ""
    factor: float = 1.0

    def text(self, time: float) -> str:
        return f"{number(time * self.factor)} {self.name}".rstrip()


def axis(horizon: float, scale: float, width: int, unit: Unit) -> str:
    """The times up to `horizon`, each written from its own column on, as far as `width` columns hold them."""
    horizon, scale = horizon * unit.factor, scale / unit.factor
    step = round_step(10 / scale) if scale else 1.0
    line = ""
    for index in range(int(horizon / step + 1e-9) + 1):
        text = f"{index * step:.10g}" + f" {unit.name}" * (index == 0 and bool(unit.name))
        column = round_half_up(index * step * scale)
        if column + len(text) <= width:
            line = line.ljust(column) + text
    return line


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)


def heading(timeline: Timeline) -> str:
    """What was planned or run: the schedule's name and its size."""
    sizes = {
        "rank": len(timeline.rows),
        "chunk": num_chunks(timeline),
        "microbatch": len({span.action.microbatch for span in timeline}),
    }
    if sizes["chunk"] == 1:
        del sizes["chunk"]
    return ", ".join([timeline.name, *(_count(number, word) for word, number in sizes.items())])


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{'' if number == 1 else plural}"


def measures(timeline: Timeline, unit: Unit) -> str:
    """Makespan, bubble and peak activations in one line; the span where it is not the makespan; and of reductions, the
    most that a rank has and what of it comes after all computations.
    """
    parts = [f"makespan {unit.text(timeline.makespan)}"]
    if unit.text(timeline.span) != unit.text(timeline.makespan):
        parts.append(f"span {unit.text(timeline.span)}")
    if time := reduction_time(timeline):
        parts.append(f"reductions {unit.text(time)}, exposed {unit.text(timeline.exposed)}")
    parts += [f"bubble {percent(timeline.bubble_ratio)}", f"peak activations {_peaks(timeline.peak_activations)}"]
    return "  ".join(parts)


class PathTimes(NamedTuple):
    """Of the critical path: per rank the time that it computes there, the time of reductions, and the time in which it
    only waits.
    """

    by_rank: list[float]
    reducing: float
    waiting: float


def path_times(timeline: Timeline) -> PathTimes:
    """What the makespan consists of."""
    by_rank, reducing = [0.0] * len(timeline.rows), 0.0
    for span, *_ in critical_path(timeline):
        if span.stream is Stream.REDUCE:
            reducing += span.end - span.start
        else:
            by_rank[span.rank] += span.end - span.start
    waiting = timeline.makespan - sum(by_rank) - reducing
    return PathTimes(by_rank, reducing, waiting if waiting > 1e-9 * timeline.makespan else 0.0)


def _peaks(peaks: tuple[float, ...]) -> str:
    if len(set(peaks)) == 1:
        return f"{peaks[0]:.4g} on every rank"
    if len(peaks) <= 8:
        return " ".join(f"{peak:.4g}" for peak in peaks)
    most, least = peaks.index(max(peaks)), peaks.index(min(peaks))
    return f"{peaks[most]:.4g} (rank {most}) to {peaks[least]:.4g} (rank {least})"
