"""Groups over torch.distributed: what a DistributedTransport makes of some of its ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeflow.parallel.transport.protocol import Lane, Start
from pipeflow.parallel.transport.work import LinkError, Work

_OF_CHANNELS = ("connection", "timed out", "timeout", "socket", "pipe", "abort")  # gloo's errors have no type


class Channels(Protocol):
    """What a group asks of the transport that made it."""

    rank: int

    def collective(self, ranks: tuple[int, ...]) -> Any:
        """What torch computes collectives of `ranks` with."""

    def receiver(self, peer: int, lane: Lane) -> Start:
        """As a Transport's."""


class DistributedGroup:
    """The `ranks` of a transport. Holds no channel itself, so that the transport can close and reopen them all."""

    def __init__(self, transport: Channels, ranks: tuple[int, ...]) -> None:
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self.ranks = ranks
        self._transport = transport

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
        try:
            return _Collective(self, getattr(self._transport.collective(self.ranks), name)(*arguments))
        except RuntimeError as error:
            raise self.lost(error) from None

    def lost(self, error: RuntimeError) -> RuntimeError | LinkError:
        """The error to raise for one of the backend's, which does not say whose end broke: asks the channels. What is
        not about a channel stays as it is.
        """
        if not isinstance(error, dist.DistError) and not any(word in str(error).lower() for word in _OF_CHANNELS):
            return error
        others = [rank for rank in self.ranks if rank != self._transport.rank]
        return LinkError(
            next(filter(self._is_closed, others), others[0]), f"in a collective of ranks {list(self.ranks)}", error
        )

    def _is_closed(self, rank: int) -> bool:
        """Whether the channel to `rank` is broken already. Leaves a receive behind: all channels are given up next."""
        try:
            self._transport.receiver(rank, Lane.CONTROL)([torch.empty(1)])
        except RuntimeError:
            return True
        return False


class _Collective:
    """A collective under way."""

    __slots__ = ("_group", "_work")

    def __init__(self, group: DistributedGroup, work: Any) -> None:
        self._group = group
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._group.lost(error) from None
