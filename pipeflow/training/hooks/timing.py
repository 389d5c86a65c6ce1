"""Times by epoch."""

from __future__ import annotations

from pipeflow.training.engine import Step
from pipeflow.training.hook import Hook
from pipeflow.training.timer import MultiTimer
from pipeflow.training.trainer import Trainer


class TimingHook(Hook):
    """Shows how long an epoch took, in seconds: "epoch seconds" for its training and "step seconds" for a step on
    average, among the metrics of training; "evaluation seconds" among those of the evaluation.

    Attributes:
        timers: "epoch" and "evaluation", whose histories have every epoch of this rank.
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
