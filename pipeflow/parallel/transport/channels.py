"""Channels of one generation over torch.distributed: made together, broken at once, from whichever thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeflow.parallel.control.monitor import Monitor
from pipeflow.parallel.control.store import MonitorStore
from pipeflow.parallel.transport.protocol import Start, Tag
from pipeflow.parallel.transport.work import LinkError

_FOREVER = timedelta(days=7)  # the monitor says when time is up; a gloo wait that ends by itself breaks its channels
_UNUSED_TAG = len(Tag)


class Channels:
    """The process groups of one generation.

    Args:
        monitor: by which the ranks find each other.
        address: of this machine, on which it listens for the others, unless GLOO_SOCKET_IFNAME names an interface.
    """

    def __init__(
        self, monitor: Monitor, address: str, *, rank: int, size: int, device: torch.device, timeout: float
    ) -> None:
        self.monitor = monitor
        self.rank = rank
        self.device = device
        self.is_broken = False
        self._address = address
        self._timeout = timedelta(seconds=timeout)
        self._nccl: dict[tuple[int, int, Tag], Any] = {}
        self._collective: dict[tuple[int, ...], Any] = {}
        self._breaking = threading.Lock()
        # One group for what goes to higher ranks and one for what goes to lower ones: a gloo connection with traffic
        # both ways keeps its thread spinning. Typed Any since torch's stubs know neither send nor recv of a group.
        self._gloo: list[Any] = [self._gloo_group(f"gloo-{way}", rank, size) for way in ("down", "up")]

    def _gloo_group(self, name: str, rank: int, size: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout  # of finding each other
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        where = {"interface": interfaces[0]} if interfaces[0] else {"hostname": self._address}
        options._devices = [gloo.create_device(**where)]
        group = gloo(MonitorStore(self.monitor, name), rank, size, options)
        group.set_timeout(_FOREVER)
        return group

    def _nccl_group(self, name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(MonitorStore(self.monitor, name), rank, size, options)

    def start(self, source: int, destination: int, tag: Tag) -> Start:
        """What starts to send with a tag where this rank is the source, else what starts to receive."""
        sends = source == self.rank
        far = destination if sends else source
        on_gpu = self.device.type == "cuda"
        if on_gpu and not tag.on_host:
            group, peer, number = self._communicator(source, destination, tag), int(sends), 0
        else:
            group, peer, number = self._gloo[destination > source], far, int(tag)
        start = partial(group.send, dstRank=peer) if sends else partial(group.recv, srcRank=peer)
        start = partial(start, tag=number)
        return partial(_OnHost, start) if on_gpu and tag.on_host else start

    def link(self, peer: int) -> End:
        """What waits for the transfers with a peer."""
        return End(self, self._gloo, {peer: peer}, "exchanging tensors")

    def collective_link(self, ranks: tuple[int, ...]) -> End:
        """What waits for the collectives of `ranks`. Whether a peer's end is closed is asked over gloo: NCCL moves
        nothing that is in CPU memory (never run on GPUs).
        """
        others = [rank for rank in ranks if rank != self.rank]
        if self.device.type == "cuda":
            return End(self, self._gloo, {rank: rank for rank in others}, in_collective(ranks))
        return End(self, [self.collective(ranks)], {rank: ranks.index(rank) for rank in others}, in_collective(ranks))

    def _communicator(self, source: int, destination: int, tag: Tag) -> Any:
        """The NCCL communicator of an ordered pair, in which the source is rank 0 and the destination rank 1."""
        key = (source, destination, tag)
        if key not in self._nccl:
            name = f"nccl-{source}-{destination}-{tag.name}"
            self._nccl[key] = self._nccl_group(name, int(self.rank == destination), 2)
        return self._nccl[key]

    def collective(self, ranks: tuple[int, ...]) -> Any:
        """What torch computes collectives of `ranks` with; made when it is first asked for. Raises LinkError."""
        if ranks not in self._collective:
            name, rank = f"group-{'-'.join(map(str, ranks))}", ranks.index(self.rank)
            make = self._nccl_group if self.device.type == "cuda" else self._gloo_group
            try:
                self._collective[ranks] = make(name, rank, len(ranks))
            except RuntimeError as error:
                expired = self.monitor.expired
                raise LinkError(ranks[rank - 1], in_collective(ranks), expired=expired, why=str(error)) from None
        return self._collective[ranks]

    def break_all(self) -> None:
        """Closes every connection, so that whoever waits, here or at the other end, wakes up."""
        with self._breaking:
            if not self.is_broken:
                self.is_broken = True
                on_gpu = self.device.type == "cuda"
                for group in (*self._nccl.values(), *(self._collective.values() if on_gpu else ())):
                    group.abort()
                for group in (*self._gloo, *(() if on_gpu else self._collective.values())):
                    _expire(group)


def _expire(group: Any) -> None:
    """Closes a group: gloo closes all of its connections when a wait expires, so one is made to. Those that are closed
    already do not wait.
    """
    for peer in range(group.size()):
        with suppress(RuntimeError):
            if peer != group.rank():
                group.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


class End:
    """This rank's end of what connects it to a peer, or to a group.

    Args:
        groups: that connect them.
        peers: who is at the other ends, with what `groups` call them.
        doing: what is done here, for people.
    """

    __slots__ = ("_channels", "_deadline", "_doing", "_groups", "_monitor", "_peers", "ranks")

    def __init__(self, channels: Channels, groups: list[Any], peers: dict[int, int], doing: str) -> None:
        self.ranks = tuple(peers)
        self._monitor = channels.monitor
        self._deadline = () if channels.device.type == "cuda" else (_FOREVER,)  # with one, NCCL would hold up the host
        self._channels = channels
        self._groups = groups
        self._peers = peers
        self._doing = doing

    def wait(self, works: Iterable[Any]) -> None:
        monitor, deadline = self._monitor, self._deadline
        try:
            for work in works:
                monitor.waits += 1
                monitor.waiting = self
                work.wait(*deadline)
        finally:
            monitor.waiting = None

    def lost(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError):
            return error
        if self._channels.is_broken:
            return LinkError(self.ranks[0], self._doing, expired=self._monitor.expired)
        if isinstance(error, dist.DistError):
            return LinkError(self.ranks[0], self._doing, why=str(error))
        ends = product(self._groups, self._peers.items())
        closed = (rank for group, (rank, index) in ends if _is_closed(group, index))
        return next((LinkError(rank, self._doing, why=str(error)) for rank in closed), error)


def in_collective(ranks: tuple[int, ...]) -> str:
    """What a rank is doing there, for people."""
    return f"in a collective of ranks {list(ranks)}"


def _is_closed(group: Any, index: int) -> bool:
    """Whether the other end has closed. Leaves a receive behind: after an error all channels are given up."""
    try:
        group.recv([torch.empty(1, device="cpu")], index, _UNUSED_TAG)
    except RuntimeError:
        return True
    return False


class _OnHost:
    """A transfer over gloo of ranks that compute on GPUs, where waits have no deadline."""

    __slots__ = ("_work",)

    def __init__(self, start: Callable[[list[Tensor]], Any], tensors: list[Tensor]) -> None:
        self._work = start(tensors)

    def wait(self) -> None:
        self._work.wait(_FOREVER)
