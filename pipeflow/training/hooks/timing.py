"""TimingHook: times of epochs and evaluations."""

from __future__ import annotations

from pipeflow.training.loop.engine import Step
from pipeflow.training.loop.trainer import Hook, Trainer
from pipeflow.training.timer import MultiTimer


class TimingHook(Hook):
    """Reports times in seconds. Metrics of training: "epoch seconds", without the evaluation, and "step seconds", the
    mean per step. Metric of the evaluation: "evaluation seconds".

    Attributes:
        timers: this rank's timers "epoch" and "evaluation"; their histories have one entry per epoch or evaluation.
    """

    priority = 15

    def __init__(self) -> None:
        self.timers = MultiTimer()
        self._steps = 0

    def before_epoch(self, trainer: Trainer) -> None:
        self._steps = 0
        self.timers.start("epoch")

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self._steps += 1

    def after_training(self, trainer: Trainer) -> None:
        seconds = self.timers.stop("epoch", keep_in_history=True) or 0.0
        trainer.metrics["train"]["epoch seconds"] = seconds
        trainer.metrics["train"]["step seconds"] = seconds / max(1, self._steps)

    def before_evaluation(self, trainer: Trainer) -> None:
        self.timers.start("evaluation")

    def after_evaluation(self, trainer: Trainer) -> None:
        trainer.metrics["test"]["evaluation seconds"] = self.timers.stop("evaluation", keep_in_history=True) or 0.0
