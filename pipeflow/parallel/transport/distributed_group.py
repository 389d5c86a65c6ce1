"""Groups over torch.distributed, which a DistributedTransport makes of some of its ranks."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from pipeflow.parallel.transport.channels import Channels
from pipeflow.parallel.transport.work import Exchange, Work


class GroupTransport(Protocol):
    """The part of a transport that its groups use."""

    rank: int

    @property
    def channels(self) -> Channels:
        """The open channels of this rank."""


class DistributedGroup:
    """The `ranks` of a transport as a group. Holds no channels itself, so that the transport can close and reopen all
    of them.
    """

    def __init__(self, transport: GroupTransport, ranks: tuple[int, ...]) -> None:
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self.ranks = ranks
        self._transport = transport

    def connect(self) -> None:
        self._transport.channels.collective(self.ranks)

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._start("allreduce", [tensor])

    def all_reduce_max(self, tensor: Tensor) -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self._start("allreduce", [tensor], options)

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        return self._start("_allgather_base", whole, part)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        return self._start("_reduce_scatter_base", part, whole)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start("broadcast", tensor, source)

    def _start(self, name: str, *arguments: object) -> Work:
        channels = self._transport.channels
        group = channels.collective(self.ranks)
        return Exchange(channels.collective_link(self.ranks), getattr(group, name), *arguments)
