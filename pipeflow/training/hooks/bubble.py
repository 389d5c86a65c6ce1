"""BubbleHook: the bubble of a step, measured and planned."""

from __future__ import annotations

from pipeflow.core.analysis.measured_step import executed_schedule, measured_costs
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.training.engine import Step
from pipeflow.training.trainer import Hook, Trainer


class BubbleHook(Hook):
    """Reports the metric "bubble", the fraction of a step in which the busiest rank is idle. Also reports "planned
    bubble", the bubble if every action took the mean time of its kind. It traces the second step, then every `every`-th
    step; steps that another hook traces are reported too.

    Args:
        every: number of steps between two traced steps.

    Raises UsageError if `every` is less than 1.
    """

    priority = 15

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise UsageError(f"every must be at least 1, got {every}")
        self.every = every
        self._steps = 0

    def before_fit(self, trainer: Trainer) -> None:
        self._steps = 0

    def before_step(self, trainer: Trainer) -> None:
        if (self._steps - 1) % self.every == 0:  # the first step compiles
            trainer.trace_next_step()
        self._steps += 1

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.timeline is not None:
            trainer.step_metrics["bubble"] = step.timeline.makespan_bubble_ratio
            trainer.step_metrics["planned bubble"] = planned(step.timeline).makespan_bubble_ratio


def planned(timeline: Timeline) -> Timeline:
    """The timeline that simulation gives for the executed schedule, under the mean costs measured in `timeline`."""
    return simulate(executed_schedule(timeline), measured_costs(timeline))
