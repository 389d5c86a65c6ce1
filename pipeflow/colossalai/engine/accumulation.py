"""What `initialize` gives back: loaders and rates that fit the steps of an optimizer which takes several batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pipeflow.core.errors import UsageError
from pipeflow.training.data import DataParallelLoader
from pipeflow.training.engine import Engine, Scheduler


class WholeSteps:
    """The batches of `loader` that fill whole steps of so many. All else is the loader's own. Raises UsageError for a
    loader with fewer batches than a step takes.
    """

    def __init__(self, loader: Any, batches_per_step: int) -> None:
        self.loader = loader
        self.batches_per_step = batches_per_step
        if not len(self):
            raise UsageError(
                f"train_dataloader has {len(loader)} batches, and a step takes {batches_per_step}: use a smaller "
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
        """Its batches. The epoch is over with the last one, whether or not more are asked for."""
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
    """The batches of one epoch, and where the engine asks for them (`next_batch`) those of the epochs after it: the
    tutorials' loops make one iterator for all epochs.
    """

    def __init__(self, steps: WholeSteps) -> None:
        self._steps = steps
        self._batches = steps.batches()

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def begin_next(self) -> None:
        """Begins the next epoch."""
        self._batches = self._steps.batches()


def next_batch(data_iter: Iterator[Any]) -> Any:
    """The next batch, of the next epoch where this one is over; None where there is none at all."""
    if not isinstance(data_iter, Iterator):
        return None  # which the step refuses
    batch = next(data_iter, None)
    if batch is None and isinstance(data_iter, Epoch):
        data_iter.begin_next()
        batch = next(data_iter, None)
    return batch


def unwrapped(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader that `initialize` was given."""
    return loader.loader if isinstance(loader, WholeSteps) else loader


class ByOptimizerSteps:
    """A scheduler whose `step()`, called after every batch, counts only where the optimizer has taken a step since."""

    def __init__(self, scheduler: Scheduler, engine: Engine) -> None:
        self.scheduler = scheduler
        self._engine = engine
        self._steps = engine.steps

    def step(self) -> None:
        """Takes the next rate, if the optimizer has taken a step since the last call."""
        if self._engine.steps > self._steps:
            self._steps = self._engine.steps
            self.scheduler.step()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.scheduler, name)
