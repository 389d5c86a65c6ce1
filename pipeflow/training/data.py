"""Loading data: every data rank its own part, the same on all ranks of a replica. What must not live here: how a batch
is cut into microbatches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import current_context
from pipeflow.training.launch import current_config


def get_dataloader(
    dataset: Dataset[Any],
    batch_size: int | None = None,
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
        batch_size: samples that this data rank takes at once; by default the configuration's BATCH_SIZE, without one 1.
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
    if batch_size is None:
        config = current_config()
        batch_size = getattr(config, "batch_size", None) or 1
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
    """torch's sampler, which can leave out the first samples of an epoch's order: what is left is dealt out anew, so
    that any number of ranks can go on from there.
    """

    start = 0  # samples of all ranks

    def __iter__(self) -> Iterator[Any]:
        order, ranks = self._order(), self.num_replicas
        each = self.left(self.start)
        padded = islice(chain(order[self.start :], cycle(order)), each * ranks)
        return islice(padded, self.rank, None, ranks)

    def left(self, start: int) -> int:
        """How many samples each rank has from there on."""
        left = max(0, self._length - start)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    @property
    def _length(self) -> int:
        assert isinstance(self.dataset, Sized)
        return len(self.dataset)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self._length, generator=generator).tolist()
        return order


class DataParallelLoader(DataLoader[Any]):
    """A loader that knows where it is: `state_dict` after any batch tells how to go on with the next one, on as many
    data ranks as one likes. Made by `get_dataloader`. After a pass to the last batch, the next one has the next epoch's
    order.
    """

    epoch = 0
    _position = 0  # samples of this epoch that all data ranks together were handed
    _start = 0  # the first of the next pass

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass. The epoch that the loader is in already goes on where it was loaded."""
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0
        self._position = self._start  # a pass that was left does not count

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's is more narrow
        part = self._part
        assert self.generator is not None
        if self._position > self._start:  # the last pass was left, perhaps after its last batch
            self.epoch = self._normal(self.epoch, self._position)["epoch"]
        start, self._start = self._start, 0
        part.set_epoch(self.epoch)
        part.start = self._position = start
        self.generator.manual_seed(_mixed(part.seed, self.epoch, part.rank))  # of the workers
        batches = super().__iter__()
        while True:
            with self._own_random_numbers(part):
                batch = next(batches, _END)
            if batch is _END:
                break
            self._position += self._size * part.num_replicas
            yield batch
        self.epoch, self._position = self.epoch + 1, 0

    def batches_left(self) -> int:
        """How many the pass that is to come, or under way, still has."""
        left = self._part.left(self._position)
        return left // self._size if self.drop_last else -(-left // self._size)

    @property
    def _part(self) -> _Part:
        assert isinstance(self.sampler, _Part)
        return self.sampler

    @property
    def _size(self) -> int:
        assert self.batch_size is not None
        return self.batch_size

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
        """The epoch, and how many of its samples all data ranks together were handed; after an epoch's last batch the
        next epoch's beginning.
        """
        return self._normal(self.epoch, self._position)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on there with the next pass, reading nothing of what came before. The number of data ranks and the
        batch's size may be others than when it was saved: no sample is lost, none is seen twice.
        """
        state = self._normal(state_dict["epoch"], state_dict["sample"])
        self.epoch = state["epoch"]
        self._position = self._start = state["sample"]

    def _normal(self, epoch: int, sample: int) -> dict[str, int]:
        left = self._part.left(sample)
        has_batch = left >= (self._size if self.drop_last else 1)
        return {"epoch": epoch, "sample": sample} if has_batch else {"epoch": epoch + 1, "sample": 0}


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
