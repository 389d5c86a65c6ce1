"""ProgressHook: progress, shown on rank 0. Must not contain: what it looks like."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from pipeflow.training.engine import Step
from pipeflow.training.trainer import Hook, Trainer

if TYPE_CHECKING:  # rich is loaded when something is shown
    from rich.console import Console

    from pipeflow.engine.runtime.step import Output
    from pipeflow.training.hooks.display import Display, TrainingProgress


class ProgressHook(Hook):
    """Shows progress and the metrics of steps and evaluations on rank 0: as bars on a terminal, elsewhere as lines,
    about ten per epoch. `Trainer(progress=True)` adds it together with hooks for the usual metrics.

    Args:
        console: rich console to write to; by default rich's global one, which `get_dist_logger` uses too, so log
            lines appear above the bars.
        clock: function that returns the time in seconds.
    """

    priority = 90

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = perf_counter) -> None:
        self.console = console
        self.clock = clock
        self._display: Display | None = None
        self._batch = 0

    def before_fit(self, trainer: Trainer) -> None:
        if trainer.engine.model.context.rank == 0:
            import rich

            from pipeflow.training.hooks.display import Bars, Lines

            console = self.console or rich.get_console()
            self._display = (Bars if console.is_interactive else Lines)(console, self.clock)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if self._display is not None:
            self._display.step(_state(trainer), trainer.step_metrics)

    def before_evaluation(self, trainer: Trainer) -> None:
        self._batch = 0

    def after_batch(self, trainer: Trainer, output: Output, labels: object) -> None:
        self._batch += 1
        if self._display is not None:
            self._display.evaluating(_state(trainer), self._batch)

    def after_evaluation(self, trainer: Trainer) -> None:
        if self._display is not None:
            self._display.evaluated(_state(trainer), trainer.metrics["test"])

    def close(self, trainer: Trainer) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.close()


def _state(trainer: Trainer) -> TrainingProgress:
    from pipeflow.training.hooks.display import TrainingProgress

    return TrainingProgress(trainer.epoch, trainer.epochs, trainer.step_in_epoch, trainer.steps_in_epoch)
