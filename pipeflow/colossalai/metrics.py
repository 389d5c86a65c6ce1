"""Metrics and times of a Trainer under ColossalAI's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pipeflow.training as native
from pipeflow.runtime.step import Output
from pipeflow.training import Hook, MultiTimer, Step

HERE = {"Loss": "loss", "Accuracy": "accuracy", "LR": "learning rate", "Throughput": "samples/s"}
THERE = {here: there for there, here in HERE.items()}


class MetricNames(MutableMapping[str, float]):
    """A trainer's own metrics, under ColossalAI's names."""

    def __init__(self, metrics: Callable[[], dict[str, float]]) -> None:
        self._metrics = metrics

    def __getitem__(self, name: str) -> float:
        return self._metrics()[HERE.get(name, name)]

    def __setitem__(self, name: str, value: float) -> None:
        self._metrics()[HERE.get(name, name)] = value

    def __delitem__(self, name: str) -> None:
        del self._metrics()[HERE.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return (THERE.get(name, name) for name in self._metrics())

    def __len__(self) -> int:
        return len(self._metrics())


def states_of(trainer: native.Trainer) -> dict[str, Any]:
    """The states: "metrics" with "train" and "test", and "step_metrics"; each maps names to numbers."""
    train, test = MetricNames(lambda: trainer.metrics["train"]), MetricNames(lambda: trainer.metrics["test"])
    return {"metrics": {"train": train, "test": test}, "step_metrics": MetricNames(lambda: trainer.step_metrics)}


class Timed(Hook):
    """Measures "Train-epoch", "Train-step", "Test-epoch" and "Test-step", and keeps their histories."""

    priority = -100  # before hooks that read them

    def __init__(self, timer: MultiTimer) -> None:
        self.timer = timer

    def before_epoch(self, trainer: native.Trainer) -> None:
        self.timer.start("Train-epoch")

    def before_step(self, trainer: native.Trainer) -> None:
        self.timer.start("Train-step")

    def after_step(self, trainer: native.Trainer, step: Step) -> None:
        self.timer.stop("Train-step", keep_in_history=True)

    def after_training(self, trainer: native.Trainer) -> None:
        self.timer.stop("Train-epoch", keep_in_history=True)

    def before_evaluation(self, trainer: native.Trainer) -> None:
        self.timer.start("Test-epoch")
        self.timer.start("Test-step")

    def after_batch(self, trainer: native.Trainer, output: Output, labels: object) -> None:
        self.timer.stop("Test-step", keep_in_history=True)
        self.timer.start("Test-step")

    def after_evaluation(self, trainer: native.Trainer) -> None:
        self.timer.stop("Test-epoch", keep_in_history=True)
