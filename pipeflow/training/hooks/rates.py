"""RateHook: reports the learning rate, and steps a scheduler."""

from __future__ import annotations

from pipeflow.optim.rates import Scheduler
from pipeflow.training.loop.engine import Step
from pipeflow.training.loop.trainer import Hook, Trainer


class RateHook(Hook):
    """Reports the metric "learning rate", the rate of the optimizer's first parameter group; also steps a scheduler.

    Args:
        scheduler: learning-rate scheduler to step. One that steps with the optimizer can also be passed to the Engine.
        by_epoch: True steps the scheduler after each epoch, False after each optimizer step that was not skipped.
    """

    priority = 10

    def __init__(self, scheduler: Scheduler | None = None, *, by_epoch: bool = True) -> None:
        self.scheduler = scheduler
        self.by_epoch = by_epoch

    def before_fit(self, trainer: Trainer) -> None:
        if self.scheduler is not None and self.scheduler not in trainer.schedulers:
            trainer.schedulers.append(self.scheduler)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        trainer.step_metrics["learning rate"] = trainer.engine.optimizer.param_groups[0]["lr"]
        if self.scheduler is not None and not self.by_epoch and step.is_taken:
            self.scheduler.step()

    def after_training(self, trainer: Trainer) -> None:
        trainer.metrics["train"]["learning rate"] = trainer.engine.optimizer.param_groups[0]["lr"]
        if self.scheduler is not None and self.by_epoch:
            self.scheduler.step()
