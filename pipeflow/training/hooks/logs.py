"""LogHook: metrics as lines of a log. Must not contain: how metrics are measured."""

from __future__ import annotations

from pipeflow.core.errors import UsageError
from pipeflow.training.hooks.metric_text import joined
from pipeflow.training.logging import DistributedLogger, get_dist_logger
from pipeflow.training.loop.engine import Step
from pipeflow.training.loop.trainer import Hook, Trainer


class LogHook(Hook):
    """Logs the metrics of each epoch and each evaluation on rank 0::

        [Epoch 3 / Train]: loss = 0.4511, learning rate = 0.001
        [Epoch 3 / Test]: loss = 0.4702, accuracy = 0.8531

    Args:
        every: also log the metrics of every `every`-th step, as "[Epoch 3 / Train, step 20 / 100]: ..."; 0 for none.
        by_epoch: log epochs and evaluations.
        logger: the logger to use; by default `get_dist_logger()`.

    Raises UsageError for a negative `every`.
    """

    priority = 80

    def __init__(self, every: int = 0, *, by_epoch: bool = True, logger: DistributedLogger | None = None) -> None:
        if every < 0:
            raise UsageError(f"every must be positive, or 0 for no steps, got {every}")
        self.every = every
        self.by_epoch = by_epoch
        self.logger = get_dist_logger() if logger is None else logger
        self._is_within_epoch = False

    def before_epoch(self, trainer: Trainer) -> None:
        self._is_within_epoch = True

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if self.every and trainer.step_in_epoch % self.every == 0:
            where = f"Train, step {trainer.step_in_epoch} / {trainer.steps_in_epoch}"
            self._log(trainer, where, trainer.step_metrics)

    def after_training(self, trainer: Trainer) -> None:
        if self.by_epoch:
            self._log(trainer, "Train", trainer.metrics["train"])

    def after_evaluation(self, trainer: Trainer) -> None:
        if self.by_epoch:
            self._log(trainer, "Test", trainer.metrics["test"])

    def after_epoch(self, trainer: Trainer) -> None:
        self._is_within_epoch = False

    def close(self, trainer: Trainer) -> None:
        self._is_within_epoch = False

    def _log(self, trainer: Trainer, where: str, metrics: dict[str, float]) -> None:
        epoch = trainer.epoch + self._is_within_epoch  # the trainer counts complete ones
        self.logger.info(f"[Epoch {epoch} / {where}]: {joined(metrics)}", ranks=[0])
