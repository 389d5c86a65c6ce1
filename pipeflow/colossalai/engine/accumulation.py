"""Loaders and learning-rate schedulers that `initialize` returns if a step of the optimizer takes several batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.training.data import DataParallelLoader
from pipeflow.training.engine import Engine, Scheduler


class WholeSteps:
    """A loader without the last batches that do not fill a step; otherwise it behaves like `loader`. Raises UsageError
    if the loader has fewer batches than a step takes.
    """

    def __init__(self, loader: Any, batches_per_step: int) -> None:
        self.loader = loader
        self.batches_per_step = batches_per_step
        if not len(self):
            raise UsageError(
                f"train_dataloader has {len(loader)} batches, but a step takes {batches_per_step}: use a smaller "
                "BATCH_SIZE or gradient_accumulation, or drop_last=False"
            )

    def __len__(self) -> int:
        return self._whole(len(self.loader))

    def __iter__(self) -> Epoch:
        return Epoch(self)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def batches(self) -> Iterator[Any]:
        """Yields its batches. The epoch ends with the last one, even if no further batch is asked for."""
        loader = self.loader
        if not isinstance(loader, DataParallelLoader):
            yield from islice(loader, len(self))
            return
        epoch, batches = loader.epoch, iter(loader)
        for left in reversed(range(self._whole(loader.batches_left()))):
            batch = next(batches)
            if not left:
                loader.set_epoch(epoch + 1)
            yield batch

    def _whole(self, batches: int) -> int:
        return batches - batches % self.batches_per_step


class Epoch:
    """An iterator over the batches of one epoch. With `next_batch` the engine continues with the next epochs, because
    the tutorials' loops make one iterator for all epochs.
    """

    def __init__(self, steps: WholeSteps) -> None:
        self._steps = steps
        self._batches = steps.batches()

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def begin_next(self) -> None:
        """Starts the next epoch."""
        self._batches = self._steps.batches()


def next_batch(data_iter: Iterator[Any]) -> Any:
    """The next batch, from the next epoch if this one is over; None if there is none at all."""
    if not isinstance(data_iter, Iterator):
        return None  # the step raises an error for it
    batch = next(data_iter, None)
    if batch is None and isinstance(data_iter, Epoch):
        data_iter.begin_next()
        batch = next(data_iter, None)
    return batch


def unwrapped(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader that was passed to `initialize`."""
    return loader.loader if isinstance(loader, WholeSteps) else loader


class ByOptimizerSteps:
    """A scheduler whose `step()` may be called after every batch, and only steps if the optimizer has stepped since."""

    def __init__(self, scheduler: Scheduler, engine: Engine) -> None:
        self.scheduler = scheduler
        self._engine = engine
        self._steps = engine.steps

    def step(self) -> None:
        """Sets the next learning rate if the optimizer has stepped since the last call."""
        if self._engine.steps > self._steps:
            self._steps = self._engine.steps
            self.scheduler.step()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.scheduler, name)
