"""RateHook: reports the learning rate, and steps a scheduler."""

from __future__ import annotations

from typing import Any

from pipeflow.engine.parallel.transport.agreement import all_gather, all_gather_object
from pipeflow.training.engine import Step
from pipeflow.training.optim.rates import Scheduler
from pipeflow.training.trainer import Hook, Trainer


class RateHook(Hook):
    """Reports the metric "learning rate", the rate of the first parameter group of rank 0's optimizer; also steps a
    scheduler.

    Args:
        scheduler: learning-rate scheduler to step. One that steps with the optimizer can also be passed to the Engine.
        by_epoch: True steps the scheduler after each epoch, False after each optimizer step that was not skipped.
    """

    priority = 10

    def __init__(self, scheduler: Scheduler | None = None, *, by_epoch: bool = True) -> None:
        self.scheduler = scheduler
        self.by_epoch = by_epoch
        self._differs = False  # whether ranks have other groups, as with rates that differ between layers

    def before_fit(self, trainer: Trainer) -> None:
        rates = [float(group["lr"]) for group in trainer.engine.optimizer.param_groups]
        everyones = all_gather_object(trainer.engine.model.context.world, rates)
        self._differs = any(each != everyones[0] for each in everyones)
        if self.scheduler is not None and self.scheduler not in trainer.schedulers:
            trainer.schedulers.append(self.scheduler)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        trainer.step_metrics["learning rate"] = self._rate(trainer)
        if self.scheduler is not None and not self.by_epoch and step.is_taken:
            self.scheduler.step()

    def after_training(self, trainer: Trainer) -> None:
        trainer.metrics["train"]["learning rate"] = self._rate(trainer)
        if self.scheduler is not None and self.by_epoch:
            self.scheduler.step()

    def _rate(self, trainer: Trainer) -> Any:
        """The rate on rank 0; all ranks call it together."""
        rate = trainer.engine.optimizer.param_groups[0]["lr"]
        return all_gather(trainer.engine.model.context.world, [float(rate)])[0][0] if self._differs else rate
