"""ColossalAI's hooks for logs: pipeflow's hooks, which find the metrics themselves."""

from __future__ import annotations

from typing import Any

import pipeflow.training as native
from pipeflow.core.errors import UsageError
from pipeflow.training import DistributedLogger, Hook, MultiTimer


class LogMetricByStepHook(Hook):
    """Does nothing: a trainer stores the metrics of steps itself, and `display_progress` shows them."""

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority


class LogMetricByEpochHook(native.LogHook):
    """pipeflow's LogHook; logs after every `interval` epochs. Raises UsageError if the interval is less than 1."""

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = native.LogHook.priority) -> None:
        super().__init__(logger=logger)
        self.interval = _at_least_one(interval)
        self.priority = priority

    def after_training(self, trainer: native.Trainer) -> None:
        self.by_epoch = (trainer.epoch + 1) % self.interval == 0
        super().after_training(trainer)


class LogTimingByEpochHook(native.TimingHook):
    """pipeflow's TimingHook; logs times after every `interval` epochs. It measures by itself, so `timer` and
    `ignore_num_train_steps` have no effect. Raises UsageError if the interval is less than 1.
    """

    def __init__(
        self,
        timer: MultiTimer,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = 0,
    ) -> None:
        super().__init__()
        self.logger = logger
        self.interval = _at_least_one(interval)
        self.priority = priority
        self.log_eval = log_eval

    def after_training(self, trainer: native.Trainer) -> None:
        super().after_training(trainer)
        self._log(trainer, "Train", trainer.metrics["train"])

    def after_evaluation(self, trainer: native.Trainer) -> None:
        super().after_evaluation(trainer)
        if self.log_eval:
            self._log(trainer, "Test", trainer.metrics["test"])

    def _log(self, trainer: native.Trainer, when: str, metrics: dict[str, float]) -> None:
        if (trainer.epoch + 1) % self.interval == 0:
            said = ", ".join(f"{name} = {value:.4g}" for name, value in metrics.items() if name.endswith("seconds"))
            self.logger.info(f"[Epoch {trainer.epoch + 1} / {when}]: {said}", ranks=[0])


class LogMemoryByEpochHook(native.MemoryHook):
    """pipeflow's MemoryHook; logs the memory of each rank after every `interval` epochs: that of the accelerator, or
    without one that of the process. Raises UsageError if the interval is less than 1.
    """

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10, **options: Any) -> None:
        if unknown := options.keys() - {"log_eval", "report_cpu"}:
            raise UsageError(f"LogMemoryByEpochHook has no option {unknown.pop()!r}: it has log_eval and report_cpu")
        super().__init__()
        self.logger = logger
        self.interval = _at_least_one(interval)
        self.priority = priority

    def after_training(self, trainer: native.Trainer) -> None:
        super().after_training(trainer)
        if (trainer.epoch + 1) % self.interval == 0:
            held = ", ".join(f"{each:.3f}" for each in self.by_rank)
            self.logger.info(f"[Epoch {trainer.epoch + 1} / Train]: GiB of each rank: {held}", ranks=[0])


def _at_least_one(interval: int) -> int:
    if interval < 1:
        raise UsageError(f"interval must be at least 1, got {interval}")
    return interval
