"""Batches: how many samples one has, and which samples of each a replica reads, of a sampler's order or of an
IterableDataset. A last batch with fewer samples than replicas is filled up. Must not contain: the order of the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from pipeflow.engine.runtime.microbatch import Divided
from pipeflow.engine.torch_private.trees import tree_leaves


def samples_of(batch: Any) -> int:
    """Number of samples in a batch; 0 if it has no tensors."""
    if isinstance(batch, Divided):
        known: int | None = getattr(batch, "samples", None)
        return sum(map(samples_of, batch.microbatches)) if known is None else known
    tree = dict(batch) if isinstance(batch, Mapping) else batch
    return next((len(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def alike(_: object) -> float:
    """The weight of a microbatch, for `weigh=`, if the loss is the mean of the microbatches' losses."""
    return 1.0


def part_of(total: int, parts: int, index: int) -> slice:
    """Part `index` when `total` things are divided into consecutive parts, of which the first are one longer.

    >>> [[*range(7)][part_of(7, 3, index)] for index in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    size, longer = divmod(total, parts)
    start = index * size + min(index, longer)
    return slice(start, start + size + (index < longer))


class ReplicaBatchSampler(BatchSampler):
    """One replica's part of each batch. A batch is cut into consecutive parts, one per replica, whose sizes differ by
    at most one, so all replicas together read the batches of a single process. A last batch with fewer samples than
    replicas is filled up with its first samples.

    Args:
        sampler: the order of the samples.
        samples: number of samples in a batch of all replicas.
        drop_last: leave out a last batch with fewer samples.
        num_processes: number of replicas.
        index: index of this replica.
    """

    def __init__(self, sampler: Iterable[int], samples: int, drop_last: bool, num_processes: int, index: int) -> None:
        super().__init__(sampler, max(1, samples // num_processes), drop_last)
        self.num_processes = num_processes
        self._samples = samples
        self._index = index

    def __iter__(self) -> Iterator[list[int]]:
        for batch in _batches(self.sampler, self._samples, self.drop_last):
            yield _part(_filled(batch, self.num_processes), self.num_processes, self._index)

    @property
    def filled(self) -> int:
        """By how many samples the last batch is filled up."""
        rest = len(self.sampler) % self._samples  # type: ignore[arg-type]  # as below
        return max(0, self.num_processes - rest) if rest and not self.drop_last else 0

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self._samples)  # type: ignore[arg-type]  # as a loader asks
        return whole + bool(rest and not self.drop_last)


class ReplicaDataset(IterableDataset[Any]):
    """One replica's samples of an IterableDataset, in the order of its batches, which are cut as ReplicaBatchSampler
    does. Each replica reads all of the dataset, which must give the same samples to all.

    Args:
        dataset: the dataset.
        samples, drop_last, num_processes, index: as in ReplicaBatchSampler.
        workers: number of worker processes of the loader.

    Attributes:
        part: number of samples in this replica's part of a batch.
        filled: for each worker, by how many samples its last batch was filled up; in memory that workers share.
    """

    def __init__(
        self, dataset: Any, samples: int, drop_last: bool, num_processes: int, index: int, workers: int = 0
    ) -> None:
        self.part = len(_part([*range(samples)], num_processes, index))
        self.filled = torch.zeros(max(1, workers), dtype=torch.int64).share_memory_()
        self._dataset = dataset
        self._samples, self._drop_last = samples, drop_last
        self._replicas, self._index = num_processes, index

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":
            raise AttributeError(name)  # while it is unpickled
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        filled = self.filled[0 if worker is None else worker.id]
        filled.zero_()
        for batch in _batches(self._dataset, self._samples, self._drop_last):
            whole = _filled(batch, self._replicas)
            filled.fill_(len(whole) - len(batch))
            yield from _part(whole, self._replicas, self._index)

    def __len__(self) -> int:
        whole, rest = divmod(len(self._dataset), self._samples)
        last = [*range(rest)] if rest and not self._drop_last else []
        return whole * self.part + len(_part(_filled(last, self._replicas), self._replicas, self._index))


def _batches(samples: Iterable[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    order = iter(samples)
    while batch := list(islice(order, size)):
        if len(batch) == size or not drop_last:
            yield batch


def _filled(batch: list[Any], replicas: int) -> list[Any]:
    return batch + (batch * replicas)[: max(0, replicas - len(batch))]


def _part(batch: list[Any], replicas: int, index: int) -> list[Any]:
    return batch[part_of(len(batch), replicas, index)]
