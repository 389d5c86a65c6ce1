"""ColossalAI's hooks for logs of metrics and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pipeflow.training as native
from pipeflow.colossalai.trainer.hooks.by_epoch import ByEpoch, at_least_one
from pipeflow.core.errors import UsageError
from pipeflow.training import DistributedLogger, Hook

if TYPE_CHECKING:  # a trainer has them
    from pipeflow.colossalai.trainer.training import Trainer


class LogMetricByStepHook(Hook):
    """Does nothing: a trainer stores the metrics of steps itself, and `display_progress` shows them."""

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority


class LogMetricByEpochHook(ByEpoch):
    """Logs the metrics of epochs and evaluations::

        [Epoch 0 / Train]: Loss = 0.45114 | LR = 0.001
        [Epoch 0 / Test]: Loss = 0.47021 | Accuracy = 0.8531

    Raises UsageError if the interval is less than 1.
    """

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = native.LogHook.priority) -> None:
        super().__init__(logger, interval, priority)

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log_metrics(trainer, "Train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._log_metrics(trainer, "Test")

    def _log_metrics(self, trainer: Trainer, when: str) -> None:
        metrics = trainer.states["metrics"][when.lower()]
        self.log(trainer, when, [f"{name} = {value:.5g}" for name, value in metrics.items()])


class LogMemoryByEpochHook(native.MemoryHook):
    """pipeflow's MemoryHook; logs the memory of each rank after every `interval` epochs: that of the accelerator, or
    without one that of the process. Raises UsageError if the interval is less than 1.
    """

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10, **options: Any) -> None:
        if unknown := options.keys() - {"log_eval", "report_cpu"}:
            raise UsageError(f"LogMemoryByEpochHook has no option {unknown.pop()!r}: it has log_eval and report_cpu")
        super().__init__()
        self.logger = logger
        self.interval = at_least_one(interval)
        self.priority = priority

    def after_training(self, trainer: native.Trainer) -> None:
        super().after_training(trainer)
        if trainer.epoch % self.interval == 0:
            held = ", ".join(f"{each:.3f}" for each in self.by_rank)
            self.logger.info(f"[Epoch {trainer.epoch} / Train]: GiB of each rank: {held}", ranks=[0])
