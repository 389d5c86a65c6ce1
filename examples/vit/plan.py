"""PlanHook: the last training step, planned and measured."""

from __future__ import annotations

import os

from rich.console import Console

import pipeflow
from pipeflow.draw import Comparison
from pipeflow.training import Hook, Step, Trainer
from pipeflow.training.hooks.bubble import planned


class PlanHook(Hook):
    """Measures the last step of `Trainer.fit`; `draw` shows it afterwards."""

    timeline: pipeflow.Timeline | None = None

    def before_step(self, trainer: Trainer) -> None:
        if trainer.epoch == trainer.epochs - 1 and trainer.step_in_epoch == trainer.steps_in_epoch - 1:
            trainer.trace_next_step()

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.timeline = step.timeline

    def draw(self) -> None:
        """Draws the measured step below its plan, which uses the measured mean times; on rank 0."""
        context = pipeflow.current_context()
        if self.timeline is None or context.rank:
            return
        console = Console(highlight=False)
        console.print(Comparison(planned(self.timeline), self.timeline))
        ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), os.cpu_count() or 1
        if ranks > cores and context.device.type == "cpu":
            console.print(f"\n{ranks} ranks share {cores} cores here, so actions take longer than they would alone.")
