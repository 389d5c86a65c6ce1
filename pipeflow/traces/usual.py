"""Usual times: how long the actions of a step usually take, and which take longer. Must not contain: idle times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from pipeflow.core.action import Kind
from pipeflow.core.dataflow import Stream
from pipeflow.core.span import Span
from pipeflow.core.timeline import Timeline

SLOW_STAGE = 1.15  # times the median stage
LATE = 1.5  # times the usual time of the action's kind and stage


class SlowStage(NamedTuple):
    """A stage whose actions usually take much longer than those of other stages.

    Attributes:
        seconds: the time by which it exceeds the median stage, in the whole step.
        ratio: its time as a multiple of the median stage's.
    """

    seconds: float
    ratio: float


class Usual:
    """The usual times of a step.

    Args:
        timeline: the step.

    Attributes:
        slow_stages: the stages that are much slower than the median one.
    """

    def __init__(self, timeline: Timeline) -> None:
        times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for row in timeline.on(Stream.COMPUTE):
            for span in row:
                times[span.action.kind, span.action.stage].append(span.end - span.start)
        self._times = {key: lower_quartile(found) for key, found in times.items()}
        work: dict[int, float] = defaultdict(float)
        for (kind, stage), found in times.items():
            work[stage] += self._times[kind, stage] * len(found)
        middle = median(work.values()) if work else 0.0
        self.slow_stages = {
            stage: SlowStage(seconds - middle, seconds / middle)
            for stage, seconds in work.items()
            if seconds > SLOW_STAGE * middle > 0
        }

    def late(self, span: Span) -> float:
        """By how much a span took longer than is usual for its kind and stage; 0 if that is little."""
        usual = self._times[span.action.kind, span.action.stage]
        extra = span.end - span.start - usual
        return extra if extra > (LATE - 1) * usual else 0.0


def lower_quartile(times: Sequence[float]) -> float:
    """The lower quartile, which late ones do not move."""
    return sorted(times)[len(times) // 4]
