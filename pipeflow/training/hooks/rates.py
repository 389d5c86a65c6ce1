"""Learning rates: shown, and changed once an epoch."""

from __future__ import annotations

from pipeflow.training.engine import Scheduler, Step
from pipeflow.training.hook import Hook
from pipeflow.training.trainer import Trainer


class RateHook(Hook):
    """Shows the learning rate of the optimizer's first group, as "learning rate"; with a scheduler takes its steps.

    Args:
        scheduler: of the learning rate. A scheduler that takes a step with every step of the optimizer may as well be
            the Engine's.
        by_epoch: whether it takes a step after each epoch, or after each step of the optimizer that was not skipped.
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
