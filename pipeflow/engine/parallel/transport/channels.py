"""Channels of one generation over torch.distributed: all ranks make them together; any thread may break all."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeflow.engine.parallel.control.monitor import Monitor, MonitorStore
from pipeflow.engine.parallel.control.rescue import aside
from pipeflow.engine.parallel.transport import nccl
from pipeflow.engine.parallel.transport.protocol import Channel, LinkError, Start, Tag, to_connect

_FOREVER = nccl.FOREVER  # a wait for gloo that ends by itself breaks its channels
_LOOK = timedelta(seconds=0.5)  # interval at which a wait for a collective over gloo checks whether channels are broken
_UNUSED_TAG = len(Tag)
_SETTLING = 2.0  # seconds
_CLOSED = "the channels were closed"


class Channels:
    """The process groups of one generation. Raises LinkError if a failure is reported, or time is up, before all ranks
    have joined.

    Args:
        monitor: through which the ranks find each other.
        address: address of this machine on which it listens for the others, unless GLOO_SOCKET_IFNAME names an
            interface.
        rank, size: this process's rank in the world, and the world's size.
        device: device of the tensors; a CUDA device selects NCCL.
        timeout: seconds to wait for the other ranks while a group is made.

    Attributes:
        is_broken: True if the channels are closed or being closed.
        awaited: the transfer that this rank waits for now. Set by the code that waits, which then checks `is_broken`.
    """

    def __init__(
        self, monitor: Monitor, address: str, *, rank: int, size: int, device: torch.device, timeout: float
    ) -> None:
        self.monitor = monitor
        self.rank = rank
        self.device = device
        self.is_broken = False
        self.awaited: Any = None
        self._address = address
        self._timeout = timedelta(seconds=timeout)
        self._aborts: list[Future[None]] = []
        self._stores: list[MonitorStore] = []
        self._connected: set[Channel] = set()
        self._nccl: dict[Channel, Any] = {}
        self._collective: dict[tuple[int, ...], Any] = {}
        self._breaking = threading.Lock()
        self._dropping: list[Future[None]] = []
        # One group for what goes to higher ranks and one for what goes to lower ones: a gloo connection with traffic
        # both ways keeps its thread spinning. Typed Any since torch's stubs know neither send nor recv of a group.
        self._gloo: list[Any] = [self._gloo_group(f"gloo-{way}", rank, size) for way in ("down", "up")]

    def _gloo_group(self, name: str, rank: int, size: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout  # for the ranks to connect
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        where = {"interface": interfaces[0]} if interfaces[0] else {"hostname": self._address}
        options._devices = [gloo.create_device(**where)]
        store = self._store(name)
        group = self._made(lambda: gloo(store, rank, size, options), expire_each)
        group.set_timeout(_FOREVER)
        return group

    def _made(self, make: Callable[[], Any], close: Callable[[list[Any]], None]) -> Any:
        """A new group, which several ranks must make together. If it is ready only after this rank has given up, it is
        closed.
        """
        making = aside(make, "pipeflow making a group")
        try:
            return self.monitor.result(making)
        except LinkError:
            making.add_done_callback(lambda made: _close_late(made, close))
            raise

    def connect(self, channels: Iterable[Channel]) -> None:
        """Connects those of `channels` that are not connected, in ascending order. Raises LinkError."""
        new = to_connect(channels, self._connected)
        if new and nccl.serves(self.device):
            self._wait_for(lambda: [*map(self._connect_channel, new)])
        self._connected.update(new)

    def _connect_channel(self, channel: Channel) -> None:
        """Makes and connects the NCCL group of a channel, in which the source is rank 0 and the destination rank 1."""
        source, destination, tag = channel
        sends = source == self.rank
        try:
            group = nccl.make(self._store(f"nccl-{source}-{destination}-{tag.name}"), int(not sends), 2, transfers=True)
            self._keep(self._nccl, channel, group)
            nccl.connect(group, self.device, _transfer(group, int(sends), 0, sends=sends))
        except RuntimeError as error:
            far = destination if sends else source
            raise LinkError(far, "connecting channels", expired=self.monitor.expired, why=str(error)) from None

    def _wait_for(self, joining: Callable[[], object]) -> None:
        """Runs what several ranks must do together. Raises LinkError."""
        try:
            self.monitor.result(aside(joining, "pipeflow connecting"))
        except LinkError as error:
            raise error.during("connecting channels") from None

    def _store(self, name: str) -> MonitorStore:
        """A store that lives as long as this object: torch's groups do not keep one that is written in Python."""
        store = MonitorStore(self.monitor, name)
        self._stores.append(store)
        return store

    def start(self, channel: Channel) -> Start:
        """The function that starts a send if this rank is the source of `channel`, else the one that starts a receive.
        Raises UsageError if the channel is not connected.
        """
        channel.require_connected(self._connected)
        source, destination, tag = channel
        sends = source == self.rank
        if channel in self._nccl:
            return _transfer(self._nccl[channel], int(sends), 0, sends=sends)
        start = _transfer(self._gloo[destination > source], destination if sends else source, int(tag), sends=sends)
        return partial(_OnHost, start) if nccl.serves(self.device) else start

    def link(self, peer: int) -> ChannelEnd:
        """The link that waits for transfers with `peer`."""
        return ChannelEnd(self, {peer: peer}, "exchanging tensors")

    def collective_link(self, ranks: tuple[int, ...]) -> ChannelEnd:
        """The link that waits for collectives of `ranks`. It asks over gloo whether a peer has closed, because NCCL
        moves nothing that is in CPU memory (never run on GPUs).
        """
        others = [rank for rank in ranks if rank != self.rank]
        if nccl.serves(self.device):
            return ChannelEnd(self, {rank: rank for rank in others}, in_collective(ranks))
        return EndOfGroup(self, {rank: ranks.index(rank) for rank in others}, in_collective(ranks), ranks)

    def over_gloo(self, ranks: tuple[int, ...]) -> list[Any]:
        """The gloo groups that connect `ranks`: the group of their collectives, or if there is none, the groups of all
        ranks.
        """
        group = self._collective.get(ranks)
        return self._gloo if group is None or nccl.serves(self.device) else [group]

    def collective(self, ranks: tuple[int, ...]) -> Any:
        """The torch group that computes collectives of `ranks`, made and connected on first use. Raises LinkError."""
        if ranks not in self._collective:
            name, rank = f"group-{'-'.join(map(str, ranks))}", ranks.index(self.rank)
            try:
                if nccl.serves(self.device):
                    self._wait_for(lambda: self._connect_group(ranks, name, rank))
                else:
                    self._keep(self._collective, ranks, self._gloo_group(name, rank, len(ranks)))
            except (RuntimeError, LinkError) as error:
                expired = self.monitor.expired
                raise LinkError(ranks[rank - 1], in_collective(ranks), expired=expired, why=str(error)) from None
        return self._collective[ranks]

    def _connect_group(self, ranks: tuple[int, ...], name: str, rank: int) -> None:
        """Makes and connects the NCCL group of `ranks`."""
        group = nccl.make(self._store(name), rank, len(ranks), transfers=False)
        self._keep(self._collective, ranks, group)
        nccl.connect(group, self.device, group.allreduce)

    def _keep(self, groups: dict[Any, Any], key: object, group: Any) -> None:
        """Stores a group so that `break_all` closes it, too. Raises RuntimeError if all are already closed."""
        with self._breaking:
            groups[key] = group
            if self.is_broken:
                self._close()
                raise RuntimeError(_CLOSED)

    def break_all(self) -> None:
        """Closes every connection, which wakes up all waits here and at the other ends."""
        with self._breaking:
            if not self.is_broken:
                self.is_broken = True
                self._close()
                if (awaited := self.awaited) is not None:
                    abort(getattr(awaited, "work", awaited))

    def _close(self) -> None:
        together = [*self._collective.values()]
        self._collective.clear()
        if nccl.serves(self.device):
            self._aborts += nccl.abort([*self._nccl.values(), *together])
            self._nccl.clear()
            together.clear()
        expire_each([*self._gloo, *together])
        if together:  # dropping a group waits for gloo's threads, which may wait forever for the rest of a message
            self._dropping.append(aside(together.clear, "pipeflow closing"))

    def settle(self) -> None:
        """Waits until closed groups are gone, or hang: if Python ended while a thread is about to return from gloo, the
        process would abort.
        """
        wait(self._dropping, timeout=_SETTLING)

    def finish(self) -> None:
        """Waits, not longer than the timeout, for transfers that other ranks may still need: to close ends them."""
        if nccl.serves(self.device) and not self.is_broken:
            wait([nccl.finish(self.device)], timeout=self._timeout.total_seconds())

    def wait_aborted(self) -> None:
        """Waits until closed groups of NCCL are gone, or hang, so that those of the next generation find the device
        free.
        """
        wait(self._aborts, timeout=_SETTLING)


def _transfer(group: Any, peer: int, number: int, *, sends: bool) -> Start:
    return partial(group.send, dstRank=peer, tag=number) if sends else partial(group.recv, srcRank=peer, tag=number)


def expire_each(groups: list[Any]) -> None:
    """Closes groups: gloo closes all connections of a group when a wait expires, so one is made to expire. Groups that
    are already closed do not wait.
    """
    for group in groups:
        for peer in range(group.size()):
            with suppress(RuntimeError):
                if peer != group.rank():
                    group.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def _close_late(made: Future[Any], close: Callable[[list[Any]], None]) -> None:
    with suppress(RuntimeError):  # the group was not made
        close([made.result()])


class ChannelEnd:
    """This rank's end of the connections to a peer or to the ranks of a group.

    Args:
        peers: maps the world rank of each peer to its rank in the gloo groups that connect it.
        doing: description of the transfers, for error messages.
        group: the ranks that compute a collective; empty for transfers.
    """

    __slots__ = ("_channels", "_deadline", "_doing", "_group", "_monitor", "_peers", "ranks")

    def __init__(self, channels: Channels, peers: dict[int, int], doing: str, group: tuple[int, ...] = ()) -> None:
        self.ranks = tuple(peers)
        self._monitor = channels.monitor
        self._deadline = () if nccl.serves(channels.device) else (_FOREVER,)  # with one, NCCL would hold up the host
        self._channels = channels
        self._peers = peers
        self._doing = doing
        self._group = group

    def wait(self, works: Iterable[Any]) -> None:
        channels, monitor, deadline = self._channels, self._monitor, self._deadline
        try:
            for work in works:
                monitor.waits += 1
                monitor.waiting = self.ranks
                channels.awaited = work
                if channels.is_broken or not work.wait(*deadline):
                    raise RuntimeError(_CLOSED)
        finally:
            monitor.waiting, channels.awaited = (), None

    def lost(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError):
            return error
        if self._channels.is_broken:
            return LinkError(self.ranks[0], self._doing, expired=self._monitor.expired)
        if isinstance(error, dist.DistError):
            return LinkError(self.ranks[0], self._doing, why=str(error))
        ends = product(self._channels.over_gloo(self._group), self._peers.items())
        closed = (rank for group, (rank, index) in ends if _is_closed(group, index))
        return next((LinkError(rank, self._doing, why=str(error)) for rank in closed), error)


class EndOfGroup(ChannelEnd):
    """This rank's end of collectives over gloo. A wait for one may time out without harm, unlike one for a transfer, so
    it checks regularly whether the channels are broken.
    """

    __slots__ = ()

    def wait(self, works: Iterable[Any]) -> None:
        monitor = self._monitor
        try:
            for work in works:
                monitor.waits += 1
                monitor.waiting = self.ranks
                while not self._is_done(work):
                    pass
        finally:
            monitor.waiting = ()

    def _is_done(self, work: Any) -> bool:
        try:
            work.wait(_LOOK)
        except RuntimeError:
            if self._channels.is_broken:
                raise
            return work.is_completed() and work.wait() is not None  # or raises its error
        return True


def in_collective(ranks: tuple[int, ...]) -> str:
    """Describes a collective of `ranks` in error messages."""
    return f"in a collective of ranks {list(ranks)}"


def _is_closed(group: Any, index: int) -> bool:
    """Returns True if the other end has closed. Leaves a receive behind: after an error all channels are dropped."""
    try:
        group.recv([torch.empty(1, device="cpu")], index, _UNUSED_TAG)
    except RuntimeError:
        return True
    return False


class _OnHost:
    """A transfer over gloo by ranks that compute on GPUs, whose waits have no deadline."""

    __slots__ = ("work",)

    def __init__(self, start: Callable[[list[Tensor]], Any], tensors: list[Tensor]) -> None:
        self.work = start(tensors)

    def wait(self) -> bool:
        done: bool = self.work.wait(_FOREVER)
        return done


# When a connection breaks, gloo ends the waits for transfers that have not begun, but not those for transfers that are
# half received or half sent. Its classes have a method for that, `abort`, which torch does not offer in Python. So it
# is called in torch's library.

_CLASSES = ("SendWork", "RecvWork")
_TO_METHODS = 2 * ctypes.sizeof(ctypes.c_void_p)  # from the start of a class's table: two entries come before


def abort(work: object) -> bool:
    """Makes `work.wait()` of a transfer of gloo's return False, now or when it is called next. For any thread.

    Returns False, and does nothing, if `work` is not a transfer of gloo's or torch's library is not as expected.
    """
    if not isinstance(work, dist.Work):  # what is behind the start of another object is anything
        return False
    pointer = _read(id(work) + object.__basicsize__)  # where pybind11 keeps it
    method = _methods().get(_read(pointer)) if pointer else None
    if method is None:
        return False
    method(pointer)
    return True


def _read(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


@cache
def _methods() -> dict[int, Callable[[int], None]]:
    """The `abort` method of each class, by the address with which objects of that class begin."""
    found: dict[int, Callable[[int], None]] = {}
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for name in _CLASSES:
            mangled = f"N4c10d16ProcessGroupGloo{len(name)}{name}"
            method = library[f"_Z{mangled}5abortEv"]
            method.argtypes, method.restype = [ctypes.c_void_p], None
            found[ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{mangled}E")) + _TO_METHODS] = method
    except (OSError, AttributeError, ValueError):
        found.clear()
    return found
