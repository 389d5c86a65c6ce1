"""Gradients of which a rank has one part of a sum over ranks; and buckets, in which gradients travel together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeflow.parallel.transport.group import Group

BUCKET = 2**22  # bytes of gradients that are exchanged at once

Item = TypeVar("Item")


def buckets(
    items: Iterable[Item], parameter: Callable[[Item], nn.Parameter], size: int = BUCKET
) -> Iterator[list[Item]]:
    """Neighbouring `items` whose parameters are of one dtype and device, as far as they fit into `size` bytes."""
    for _, alike in groupby(items, key=lambda item: (parameter(item).dtype, parameter(item).device)):
        bucket: list[Item] = []
        filled = 0
        for item in alike:
            filled += parameter(item).nbytes
            if bucket and filled > size:
                yield bucket
                bucket, filled = [], parameter(item).nbytes
            bucket.append(item)
        yield bucket


def in_buckets(parameters: Iterable[nn.Parameter], size: int = BUCKET) -> list[list[nn.Parameter]]:
    """Parameters themselves as `buckets`."""
    return list(buckets(parameters, lambda parameter: parameter, size))


@dataclass(slots=True)
class Summand:
    """A parameter whose gradient is a sum over ranks. Its part of this step alone is summed: what earlier steps left,
    which was summed then, is set aside meanwhile.
    """

    parameter: nn.Parameter
    before: Tensor | None = None

    def begin(self) -> None:
        self.before, self.parameter.grad = self.parameter.grad, None

    def gradient(self) -> Tensor:
        """This step's part, in a row."""
        grad = self.parameter.grad
        return (torch.zeros_like(self.parameter) if grad is None else grad).flatten()

    def end(self, total: Tensor) -> None:
        """Takes the sum, in a row, and adds what was set aside."""
        gradient = total.view(self.parameter.shape)
        self.parameter.grad = gradient if self.before is None else self.before.add_(gradient)
        self.before = None


class Parts:
    """The parameters whose gradient on a tensor rank is its part of a sum, as under sequence parallelism."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: Group) -> None:
        self._group = group
        self._summands = [Summand(parameter) for parameter in parameters if parameter.requires_grad]
        if group.size == 1:
            self._summands = []
        self._buckets = list(buckets(self._summands, lambda summand: summand.parameter))

    def begin(self) -> None:
        for summand in self._summands:
            summand.begin()

    def end(self) -> None:
        """Sums over the tensor ranks. Raises LinkError."""
        for bucket in self._buckets:
            total = torch.cat([summand.gradient() for summand in bucket])
            self._group.all_reduce(total).wait()
            sizes = [summand.parameter.numel() for summand in bucket]
            for summand, part in zip(bucket, total.split(sizes), strict=True):
                summand.end(part)
