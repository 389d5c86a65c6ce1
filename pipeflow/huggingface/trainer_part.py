"""Part: which samples of each batch a replica reads. What must not live here: the order of the samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from torch.utils.data import BatchSampler


class Part(BatchSampler):
    """One replica's part of each batch: the batches of one process, cut into as many consecutive parts as there are
    replicas, whose sizes differ by one at most. So replicas together read what a single process would. A last batch of
    fewer samples than replicas is filled up with its first ones.

    Args:
        sampler: the order of the samples.
        samples: of a batch of all replicas.
        drop_last: whether to leave out a last batch that has fewer.
        num_processes: the replicas.
        index: this one.
    """

    def __init__(self, sampler: Iterable[int], samples: int, drop_last: bool, num_processes: int, index: int) -> None:
        super().__init__(sampler, max(1, samples // num_processes), drop_last)
        self.num_processes = num_processes
        self._samples = samples
        self._index = index

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(self.sampler)
        while batch := list(islice(order, self._samples)):
            if len(batch) == self._samples or not self.drop_last:
                yield self._part(batch)

    def _part(self, batch: list[int]) -> list[int]:
        replicas = self.num_processes
        batch = batch + (batch * replicas)[: max(0, replicas - len(batch))]
        base, larger = divmod(len(batch), replicas)
        first = self._index * base + min(self._index, larger)
        return batch[first : first + base + (self._index < larger)]

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self._samples)  # type: ignore[arg-type]  # as a loader asks
        return whole + bool(rest and not self.drop_last)
