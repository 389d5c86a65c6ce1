"""PlanHook: the last training step, planned and measured."""

from __future__ import annotations

import os

from rich.console import Console

import pipeflow
from pipeflow.draw import Comparison
from pipeflow.training import Hook, Step, Trainer


class PlanHook(Hook):
    """Measures the last step of `Trainer.fit`; `draw` shows it afterwards."""

    measured: pipeflow.Timeline | None = None
    planned: pipeflow.Timeline | None = None

    def before_step(self, trainer: Trainer) -> None:
        if trainer.epoch == trainer.epochs - 1 and trainer.step_in_epoch == trainer.steps_in_epoch - 1:
            trainer.trace_next_step()

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if (measured := step.timeline) is not None:
            model = trainer.engine.model
            schedule = model.schedule.with_reductions() if model.context.data_size > 1 else model.schedule
            self.measured, self.planned = measured, pipeflow.simulate(schedule, pipeflow.measured_costs(measured))

    def draw(self) -> None:
        """Draws the measured step below its plan, which uses the measured mean times; on rank 0."""
        context = pipeflow.current_context()
        if self.measured is None or self.planned is None or context.rank:
            return
        console = Console(highlight=False)
        console.print(Comparison(self.planned, self.measured))
        ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), os.cpu_count() or 1
        if ranks > cores and context.device.type == "cpu":
            console.print(f"\n{ranks} ranks share {cores} cores here, so actions take longer than they would alone.")
