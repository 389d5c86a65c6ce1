"""Comparison: two timelines on one time scale, such as a plan and a measured step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rich.console import Console, ConsoleOptions, RenderResult

from pipeflow.core.timeline import Timeline
from pipeflow.draw.captions import heading
from pipeflow.draw.terminal.gantt import stacked
from pipeflow.draw.times import Unit


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """Draws two timelines one above the other on the same time scale, each as a `Gantt` with its own measures. For
    rich's `print`.

    Attributes:
        first, second: the timelines, in the same unit of time: simulate the plan under the measured costs.
        unit, factor: times are written multiplied by `factor` and followed by `unit`. Default: a readable unit for
            timelines in seconds.
        titles: words before the two headings.
        memory: whether to draw the memory of each rank.
    """

    first: Timeline
    second: Timeline
    unit: str = ""
    factor: float = 1.0
    titles: tuple[str, str] = ("planned", "measured")
    memory: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timelines = self.first, self.second
        unit = Unit.of(timelines, self.unit, self.factor)
        titles = [f"{title}: {heading(timeline)}" for title, timeline in zip(self.titles, timelines, strict=True)]
        return stacked(titles, timelines, unit, console, options, memory=self.memory)
