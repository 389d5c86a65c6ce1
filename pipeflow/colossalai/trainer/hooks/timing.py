"""ColossalAI's hook for logs of times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.colossalai.trainer.hooks.by_epoch import ByEpoch
from pipeflow.core.errors import UsageError
from pipeflow.training import DistributedLogger, MultiTimer

if TYPE_CHECKING:  # a trainer has them
    from pipeflow.colossalai.trainer.training import Trainer


class LogTimingByEpochHook(ByEpoch):
    """Logs the times of epochs, steps and evaluations::

        [Epoch 0 / Train]: Train-epoch: last = 2.5 s, mean = 2.5 s | Train-step: last = 0.02 s, mean = 0.025 s
        [Epoch 0 / Test]: Test-epoch: last = 0.5 s, mean = 0.5 s | Test-step: last = 0.01 s, mean = 0.01 s

    Args:
        timer: the timer of the Trainer.
        logger: where to log.
        interval: number of epochs between two lines.
        priority: as in BaseHook.
        log_eval: log evaluations.
        ignore_num_train_steps: number of steps at the start that means leave out.

    Raises UsageError if the interval is less than 1, and when training starts if the Trainer has another timer.
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
        super().__init__(logger, interval, priority)
        self.timer = timer
        self.log_eval = log_eval
        self.ignored = {"Train-step": ignore_num_train_steps}

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if trainer.timer is not self.timer:
            raise UsageError("LogTimingByEpochHook logs what a Trainer measures: pass its timer to Trainer(timer=...)")

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log_times(trainer, "Train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        if self.log_eval:
            self._log_times(trainer, "Test")

    def _log_times(self, trainer: Trainer, when: str) -> None:
        said = []
        for name, timer in self.timer:
            if name.startswith(when):
                counted = timer.history[self.ignored.get(name, 0) :]
                mean = sum(counted) / max(1, len(counted))
                said.append(f"{name}: last = {timer.elapsed:.5g} s, mean = {mean:.5g} s")
        self.log(trainer, when, said)
