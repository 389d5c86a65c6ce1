"""ReplicaBatchSampler: the samples of each batch that a replica reads. Must not contain: the order of the samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from torch.utils.data import BatchSampler


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
