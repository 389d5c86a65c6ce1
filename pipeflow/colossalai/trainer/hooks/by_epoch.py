"""ByEpoch: the base class of hooks that log epochs. Epochs are counted from 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.colossalai.trainer.hooks.base import BaseHook
from pipeflow.core.errors import UsageError
from pipeflow.training import DistributedLogger

if TYPE_CHECKING:  # a trainer has them
    from pipeflow.colossalai.trainer.training import Trainer


class ByEpoch(BaseHook):
    """Logs a line on rank 0 after each epoch whose number is a multiple of `interval`, and after its evaluation. Raises
    UsageError if the interval is less than 1.
    """

    def __init__(self, logger: DistributedLogger, interval: int, priority: int) -> None:
        super().__init__(priority)
        self.logger = logger
        self.interval = at_least_one(interval)

    def log(self, trainer: Trainer, when: str, said: list[str]) -> None:
        """Logs the parts of a line, unless the epoch is not one to log."""
        if trainer.cur_epoch % self.interval == 0:
            self.logger.info(f"[Epoch {trainer.cur_epoch} / {when}]: {' | '.join(said)}", ranks=[0])


def at_least_one(interval: int) -> int:
    """Returns the interval. Raises UsageError if it is less than 1."""
    if interval < 1:
        raise UsageError(f"interval must be at least 1, got {interval}")
    return interval
