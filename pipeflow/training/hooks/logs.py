"""Hooks that write metrics: as lines of a log, and to TensorBoard, Weights & Biases or MLflow. Must not contain: how
metrics are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeflow.core.distributions import install
from pipeflow.core.errors import UsageError, unknown
from pipeflow.core.placement import require_at_least, require_positive
from pipeflow.draw.image import pixels
from pipeflow.training.engine import Step
from pipeflow.training.hooks.measuring import planned
from pipeflow.training.logging import DistributedLogger, get_dist_logger
from pipeflow.training.trainer import Hook, Trainer

_SHARES = ("MFU", "bubble", "planned bubble")


def number(name: str, value: float) -> str:
    """The value of the metric `name` as text.

    >>> number("loss", 0.123456), number("samples/s", 12345.678), number("bubble", 0.25)
    ('0.1235', '12,346', '25.0%')
    """
    if name in _SHARES:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def joined(metrics: Mapping[str, float]) -> str:
    """All metrics on one line.

    >>> joined({"loss": 0.5, "learning rate": 1e-3})
    'loss = 0.5, learning rate = 0.001'
    """
    return ", ".join(f"{name} = {number(name, value)}" for name, value in metrics.items())


def items(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and values as text; the planned bubble is shown with the measured one.

    >>> items({"loss": 0.5, "bubble": 0.25, "planned bubble": 0.2})
    [('loss', '0.5'), ('bubble', '25.0% (planned 20.0%)')]
    """
    shown = {name: number(name, value) for name, value in metrics.items()}
    if {"bubble", "planned bubble"} <= set(shown):
        shown["bubble"] += f" (planned {shown.pop('planned bubble')})"
    return list(shown.items())


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


class MetricLogger(Protocol):
    """An object that stores or shows metrics. If it can show pictures, it also has `picture(name, image, step)`, where
    `image` is a uint8 tensor [height, width, 3].
    """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Logs metrics by name; `step` is the number of training steps so far."""

    def close(self) -> None:
        """Called after training, also after an error."""


class LoggerHook(Hook):
    """Passes metrics to a logger on rank 0: metrics of steps as "step/loss", of epochs as "train/loss", of evaluations
    as "test/accuracy". The x axis is the number of training steps.

    Args:
        logger: "tensorboard", "wandb", "mlflow", or an object with `log(values, step)` and `close()`.
        every: number of steps between two logged steps.
        picture_every: number of steps between two pictures of the timeline, the plan above the measured one, if the
            logger can show pictures; 0 for none.
        options: keyword arguments of torch.utils.tensorboard.SummaryWriter, wandb.init or mlflow.start_run.

    Raises UsageError for an unknown logger, for one that is not installed, and for numbers out of range.
    """

    priority = 85

    def __init__(
        self, logger: str | MetricLogger, *, every: int = 1, picture_every: int = 0, **options: object
    ) -> None:
        require_positive(every=every)
        require_at_least(0, picture_every=picture_every)
        self._make: Callable[[], Any]
        if isinstance(logger, str):
            self._make = _maker(logger, options)
        elif missing := [method for method in ("log", "close") if not hasattr(logger, method)]:
            raise UsageError(
                f"a logger has log(values, step) and close(), and {type(logger).__name__} has no {missing[0]}(): "
                f"give such an object, or one of {', '.join(map(repr, LOGGERS))}"
            )
        elif options:
            raise UsageError(f"{', '.join(options)}: options are only for loggers that are given by name")
        else:
            self._make = lambda: logger
        self.every = every
        self.picture_every = picture_every
        self._logger: Any = None  # on rank 0, while training runs

    def before_fit(self, trainer: Trainer) -> None:
        if trainer.engine.model.context.rank == 0:
            self._logger = self._make()

    def before_step(self, trainer: Trainer) -> None:
        if self.picture_every and (trainer.engine.steps - 1) % self.picture_every == 0:  # the first step compiles
            trainer.trace_next_step()

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if self._logger is None:
            return
        if trainer.engine.steps % self.every == 0:
            self._log(trainer, "step", trainer.step_metrics)
        if self.picture_every and step.timeline is not None and hasattr(self._logger, "picture"):
            width, height, rgb = pixels([planned(step.timeline), step.timeline])
            image = torch.frombuffer(rgb, dtype=torch.uint8).view(height, width, 3)
            self._logger.picture("timeline, planned and measured", image, trainer.engine.steps)

    def after_training(self, trainer: Trainer) -> None:
        self._log(trainer, "train", trainer.metrics["train"])

    def after_evaluation(self, trainer: Trainer) -> None:
        self._log(trainer, "test", trainer.metrics["test"])

    def close(self, trainer: Trainer) -> None:
        logger, self._logger = self._logger, None
        if logger is not None:
            logger.close()

    def _log(self, trainer: Trainer, where: str, metrics: Mapping[str, float]) -> None:
        if self._logger is not None:
            values = {f"{where}/{name}": value for name, value in metrics.items()}
            self._logger.log(values, trainer.engine.steps)


class TensorBoardHook(LoggerHook):
    """Writes metrics for TensorBoard, and pictures of the timeline. `tensorboard --logdir FOLDER` shows them.

    Args:
        folder: folder that rank 0 writes to; it is created if missing.
        every, picture_every: as in LoggerHook.

    Raises UsageError if tensorboard is not installed.
    """

    def __init__(self, folder: str | PathLike[str], *, every: int = 10, picture_every: int = 500) -> None:
        super().__init__("tensorboard", every=every, picture_every=picture_every, log_dir=str(folder))


class _TensorBoard:
    def __init__(self, make_writer: Any, options: dict[str, Any]) -> None:
        self._writer = make_writer(**options)

    @staticmethod
    def load() -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, name: str, image: Tensor, step: int) -> None:
        self._writer.add_image(name, image, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, library: Any, options: dict[str, Any]) -> None:
        self._library = library
        self._run = library.init(**options)

    @staticmethod
    def load() -> Any:
        import wandb

        return wandb

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, name: str, image: Tensor, step: int) -> None:
        self._run.log({name: self._library.Image(image.numpy())}, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, library: Any, options: dict[str, Any]) -> None:
        self._library = library
        library.start_run(**options)

    @staticmethod
    def load() -> Any:
        import mlflow

        return mlflow

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._library.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._library.end_run()


LOGGERS: dict[str, tuple[type[_TensorBoard | _Wandb | _MLflow], str]] = {  # with the command to install it
    "tensorboard": (_TensorBoard, install("tensorboard")),
    "wandb": (_Wandb, "pip install wandb"),
    "mlflow": (_MLflow, "pip install mlflow"),
}


def _maker(name: str, options: dict[str, Any]) -> Callable[[], Any]:
    """A function that makes the logger `name`. Raises UsageError for an unknown name or a missing package."""
    if name not in LOGGERS:
        raise unknown("logger", name, LOGGERS)
    make, install = LOGGERS[name]
    try:
        library = make.load()
    except ImportError as error:
        raise UsageError(f"{name} is not installed ({error}): {install}") from None
    return lambda: make(library, options)
