"""Comparison: two timelines above each other on one time scale: a plan and what happened, or two plans."""

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
    """Draws two timelines above each other, each as a `Gantt` with its own measures, on the same time scale.

    Both must be in the same unit of time: simulate the plan under the costs that were measured. Each is titled by what
    it is, and before that by the word that `titles` has for it.
    """

    first: Timeline
    second: Timeline
    unit: str = ""
    factor: float = 1.0
    titles: tuple[str, str] = ("planned", "measured")
    memory: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timelines = self.first, self.second
        titles = [f"{title}: {heading(timeline)}" for title, timeline in zip(self.titles, timelines, strict=True)]
        return stacked(titles, timelines, Unit(self.unit, self.factor), console, options, memory=self.memory)
