"""Loading data: every data rank its own part, the same on all ranks of a replica. What must not live here: how a batch
is cut into microbatches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import current_context


def get_dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    add_sampler: bool = True,
    **kwargs: Any,
) -> DataParallelLoader:
    """A loader of this data rank's part of `dataset`, the same on all tensor and pipeline ranks, with as many batches
    on every data rank.

    Order and random numbers follow from `seed`, the epoch and the data rank, never from torch's default generator,
    which is in another state on every stage; and they leave that one as it was.

    Args:
        dataset: must have a length.
        batch_size: samples that this data rank takes at once.
        shuffle: in another order every epoch.
        drop_last: leave out the last samples that fill no batch, or not one on every rank; otherwise, where the
            dataset does not divide among the data ranks, some samples come twice.
        add_sampler: whether each data rank has a part of its own; otherwise all have the whole.
        pin_memory: only done where this process computes on a GPU.
        num_workers, kwargs: as torch.utils.data.DataLoader takes them.

    Raises UsageError for a dataset without a length, or without a context.
    """
    context = current_context()
    if not isinstance(dataset, Sized):
        raise UsageError(f"{type(dataset).__name__} has no length: give each data rank its part of it yourself")
    ranks, rank = (context.data_size, context.data_rank) if add_sampler else (1, 0)
    sampler = _Part(dataset, ranks, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    return DataParallelLoader(
        dataset,
        batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=pin_memory and context.device.type != "cpu",
        num_workers=num_workers,
        generator=torch.Generator(),
        **kwargs,
    )


class _Part(DistributedSampler[Any]):
    """torch's sampler, which can leave out the first samples."""

    start = 0  # samples

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.start, None)


class DataParallelLoader(DataLoader[Any]):
    """A loader that knows where it is: `state_dict` after any batch tells how to go on with the next one. Made by
    `get_dataloader`. Every pass to the end ends an epoch, and the next one has the next epoch's order.
    """

    epoch = 0
    _position = 0  # batches of this epoch that were handed out
    _start = 0  # the first batch of the next pass

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass. The epoch that the loader is in already goes on where it was loaded."""
        if epoch != self.epoch:
            self.epoch, self._position, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        part = self.sampler
        assert isinstance(part, _Part)
        assert self.batch_size is not None
        assert self.generator is not None
        start, self._start = self._start, 0
        part.set_epoch(self.epoch)
        part.start = start * self.batch_size
        self._position = start
        self.generator.manual_seed(_mixed(part.seed, self.epoch, part.rank))  # of the workers
        batches = super().__iter__()
        while True:
            with self._own_random_numbers(part):
                batch = next(batches, _END)
            if batch is _END:
                break
            self._position += 1
            yield batch
        self.epoch, self._position = self.epoch + 1, 0

    @contextmanager
    def _own_random_numbers(self, part: _Part) -> Iterator[None]:
        """Where this process reads the samples itself, what a dataset draws is as determined as the order."""
        if self.num_workers > 0:
            yield
            return
        number = _mixed(part.seed, self.epoch, part.rank, self._position)
        default, before, others = torch.default_generator, torch.get_rng_state(), random.getstate()
        default.manual_seed(number)
        random.seed(number)
        try:
            yield
        finally:
            torch.set_rng_state(before)
            random.setstate(others)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were handed out."""
        return {"epoch": self.epoch, "batch": self._position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on there with the next pass, reading nothing of what came before."""
        self.epoch, self._position = state_dict["epoch"], state_dict["batch"]
        self._start = self._position


_END = object()


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of one epoch after another. Raises UsageError for a loader without any."""
    if len(loader) == 0:
        raise UsageError("the loader has no batch: use a smaller batch_size, or drop_last=False")
    while True:
        yield from loader


def _mixed(*numbers: int) -> int:
    """A seed that differs where any of the numbers does."""
    return random.Random(repr(numbers)).getrandbits(63)
