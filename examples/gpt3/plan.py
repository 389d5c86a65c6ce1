"""PlanHook: what a training run has learnt, and its last step, planned and measured."""

from __future__ import annotations

import os

from rich.console import Console

import pipeflow
from pipeflow.draw import Comparison
from pipeflow.training import Hook, Step, Trainer


class PlanHook(Hook):
    """Notes losses and the speed, and measures the last step of `Trainer.fit`; `tell` shows them afterwards.

    Args:
        max_steps: as passed to `fit`.
    """

    measured: pipeflow.Timeline | None = None

    def __init__(self, max_steps: int | None = None) -> None:
        self.max_steps = max_steps
        self.losses: list[float] = []
        self.speed = ""

    def before_step(self, trainer: Trainer) -> None:
        in_last_epoch = trainer.epoch == trainer.epochs - 1 and trainer.step_in_epoch == trainer.steps_in_epoch - 1
        if in_last_epoch or trainer.engine.steps + 1 == self.max_steps:
            trainer.trace_next_step()

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.losses.append(float(step.loss))
        what = next((name for name in ("tokens/s", "samples/s") if name in trainer.step_metrics), None)
        self.speed = f", {trainer.step_metrics[what]:,.0f} {what}" if what else ""
        if (measured := step.timeline) is not None:
            self.measured = measured

    def tell(self, model: pipeflow.Pipeline) -> None:
        """Says what was learnt, and draws the last step, as `tell_step` does."""
        if self.measured is not None and self.losses:
            losses = f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}, {len(self.losses)} steps"
            tell_step(self.measured, model, losses + self.speed)


def tell_step(measured: pipeflow.Timeline, model: pipeflow.Pipeline, learnt: str) -> None:
    """Says what was learnt and the bubble, and draws the measured step below its plan, which has the measured mean
    times. Only rank 0 does so.
    """
    context = model.context
    schedule = model.schedule.with_reductions() if context.data_size > 1 else model.schedule
    planned = pipeflow.simulate(schedule, pipeflow.measured_costs(measured))
    console = Console(highlight=False, quiet=context.rank > 0)
    bubbles = [f"{each.makespan_bubble_ratio:.1%}" for each in (measured, planned)]
    console.print(f"\nlearnt: {learnt}")
    console.print(f"bubble of the last step: {bubbles[0]} measured, {bubbles[1]} planned\n")
    console.print(Comparison(planned, measured))
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), os.cpu_count() or 1
    if ranks > cores and context.device.type == "cpu":
        console.print(f"\n{ranks} ranks share {cores} cores here, so actions take longer than they would alone.")
