"""Comparison: the plan above what happened, on one time scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rich.console import Console, ConsoleOptions, RenderResult

from pipeflow.core.timeline import Timeline
from pipeflow.draw.gantt import stacked
from pipeflow.draw.measures import Unit, heading


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """Draws two timelines above each other, each as a `Gantt` with its own measures, on the same time scale.

    Both must be in the same unit of time: simulate the plan under the costs that were measured.
    """

    planned: Timeline
    measured: Timeline
    unit: str = ""
    factor: float = 1.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timelines = {
            f"planned: {heading(self.planned)}": self.planned,
            f"measured: {heading(self.measured)}": self.measured,
        }
        return stacked(timelines, Unit(self.unit, self.factor), console, options)
