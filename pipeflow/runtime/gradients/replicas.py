"""Replicas: the ranks that hold the same weights for other data. Their weights start the same, and their gradients are
averaged, in buckets that are on their way while the rank computes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeflow.parallel.transport.group import Group
from pipeflow.parallel.transport.work import Work


class Replicas:
    """The averages over one data-parallel group that are under way on this rank."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._averages: list[_Average] = []

    @property
    def size(self) -> int:
        return self._group.size

    def start(self, buckets: Iterable[list[nn.Parameter]]) -> list[Work]:
        """Starts to average what the parameters have for gradients now, by buckets. A parameter without one on all
        replicas keeps none. Raises LinkError.
        """
        if self.size == 1:
            return []
        averages = [_Average.start(bucket, self._group) for bucket in buckets]
        self._averages += averages
        return [average.work for average in averages]

    def finish(self) -> None:
        """Waits for all that was started, and puts the averages where the gradients were. Raises LinkError."""
        for average in self._averages:
            average.finish()
        self._averages = []

    def forget(self) -> None:
        """Drops what is under way."""
        self._averages = []


@dataclass(slots=True)
class _Average:
    """One bucket: this rank's share of the mean of each gradient, in a row, and behind them, per parameter, whether
    this rank has a gradient.
    """

    bucket: list[nn.Parameter]
    flat: Tensor
    work: Work

    @classmethod
    def start(cls, bucket: list[nn.Parameter], group: Group) -> _Average:
        with torch.no_grad():
            parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in bucket]
            flat = torch.cat([*parts, parts[0].new_tensor([float(p.grad is not None) for p in bucket])])
            flat /= group.size
            return cls(bucket, flat, group.all_reduce(flat))

    def finish(self) -> None:
        self.work.wait()
        with torch.no_grad():
            *means, there = self.flat.split([*(p.numel() for p in self.bucket), len(self.bucket)])
            for parameter, mean, part in zip(self.bucket, means, there.tolist(), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(mean.view_as(parameter))
                elif part:
                    parameter.grad = mean.view_as(parameter).clone()


def share_values(module: nn.Module, group: Group, *, without: Iterable[int] = ()) -> None:
    """Gives every rank of `group` the parameters and buffers of its rank 0, but those whose ids are in `without`.
    What is on the meta device has none, and what torch shards is its business. Raises LinkError.
    """
    if group.size == 1:
        return
    left = set(without)
    own = [value for value in _values(module) if id(value) not in left and not isinstance(value, DTensor)]
    values = [value.data for value in own if not value.is_meta]
    copies = [value.contiguous() for value in values]
    works = [group.broadcast(copy, 0) for copy in copies]
    for value, copy, work in zip(values, copies, works, strict=True):
        work.wait()
        value.copy_(copy)


def _values(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
