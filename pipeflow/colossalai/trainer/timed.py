"""Timed: a hook that measures a Trainer's times under ColossalAI's names."""

from __future__ import annotations

from pipeflow.runtime.step import Output
from pipeflow.training import Hook, MultiTimer, Step, Trainer


class Timed(Hook):
    """Measures "Train-epoch", "Train-step", "Test-epoch" and "Test-step", and keeps their histories."""

    priority = -100  # before hooks that read them

    def __init__(self, timer: MultiTimer) -> None:
        self.timer = timer

    def before_epoch(self, trainer: Trainer) -> None:
        self.timer.start("Train-epoch")

    def before_step(self, trainer: Trainer) -> None:
        self.timer.start("Train-step")

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.timer.stop("Train-step", keep_in_history=True)

    def after_training(self, trainer: Trainer) -> None:
        self.timer.stop("Train-epoch", keep_in_history=True)

    def before_evaluation(self, trainer: Trainer) -> None:
        self.timer.start("Test-epoch")
        self.timer.start("Test-step")

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        self.timer.stop("Test-step", keep_in_history=True)
        self.timer.start("Test-step")

    def after_evaluation(self, trainer: Trainer) -> None:
        self.timer.stop("Test-epoch", keep_in_history=True)
