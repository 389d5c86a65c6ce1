"""Channels of one generation over torch.distributed: all ranks make them together; any thread may break all. Over gloo,
two ranks connect when one of them first needs the other.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeflow.core.agreement_rounds import rounds
from pipeflow.engine.parallel.control.monitor import Monitor, MonitorStore
from pipeflow.engine.parallel.control.rescue import aside
from pipeflow.engine.parallel.transport import nccl
from pipeflow.engine.parallel.transport.protocol import (
    Channel,
    LinkError,
    Start,
    Tag,
    in_collective,
    saying,
    to_connect,
)

_FOREVER = nccl.FOREVER  # a wait for gloo that ends by itself breaks its channels
_LOOK = timedelta(seconds=0.5)  # interval at which a wait for a collective over gloo checks whether channels are broken
_UNUSED_TAG = len(Tag)
_AT_ONCE = 0.05  # seconds: a peer of gloo's that does not answer in this time is not connected
_SETTLING = 2.0  # seconds
_NAMED = 8  # ranks of a group whose name has them all
_DOWN, _UP = "gloo-down", "gloo-up"


class Members(NamedTuple):
    """The ranks of a group, whose tensors are in CPU memory if `on_host`."""

    ranks: tuple[int, ...]
    on_host: bool = False


class Channels:
    """The process groups of one generation.

    Args:
        monitor: through which the ranks find each other.
        address: address of this machine on which it listens for the others, unless GLOO_SOCKET_IFNAME names an
            interface.
        rank, size: this process's rank in the world, and the world's size.
        device: device of the tensors; a CUDA device selects NCCL.

    Attributes:
        deadline: of waits for transfers.
        is_broken: True if the channels are closed or being closed.
        awaited: the transfer that this rank waits for now. Set by the code that waits, which then checks `is_broken`.
    """

    def __init__(self, monitor: Monitor, address: str, *, rank: int, size: int, device: torch.device) -> None:
        self.monitor = monitor
        self.rank = rank
        self.device = device
        self.deadline = () if nccl.serves(device) else (_FOREVER,)  # with one, NCCL would hold up the host
        self.is_broken = False
        self.awaited: Any = None
        self._address = address
        self._aborts: list[Future[None]] = []
        self._stores: list[MonitorStore] = []
        self._connected: set[Channel] = set()
        self._nccl: dict[Channel, Any] = {}
        self._collective: dict[Members, Any] = {}
        self._changing = threading.RLock()
        self._dropping: list[Future[None]] = []
        self._generation = monitor.generation
        self._meetings: dict[tuple[str, int], Future[Any]] = {}
        # One group for what goes to higher ranks and one for what goes to lower ones: a gloo connection with traffic
        # both ways keeps its thread spinning. Typed Any since torch's stubs know neither send nor recv of a group.
        with self._changing:
            monitor.meets = self._be_met
            self._gloo: dict[str, Any] = {way: self._gloo_group(way, rank, size, meets=True) for way in (_DOWN, _UP)}

    def _gloo_group(self, name: str, rank: int, size: int, *, meets: bool = False) -> Any:
        """A group of gloo's, which waits for no other rank. Two of its ranks connect when both use their connection; if
        it `meets`, when one does.
        """
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _FOREVER
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        where = {"interface": interfaces[0]} if interfaces[0] else {"hostname": self._address}
        options._devices = [gloo.create_device(**where, lazy_init=True)]
        return gloo(self._store(name, rank if meets else None), rank, size, options)

    # The first use of a connection of gloo's reads the other rank's address, and blocks until both ranks have come to
    # it. So another thread of each rank comes to it: of the rank that needs the other, and, when the coordinator tells
    # it, of that other rank, whatever it does meanwhile.

    def _meet(self, way: str, peer: int) -> Future[Any]:
        """Begins to connect with `peer`, unless this was done."""
        with self._changing:
            if (way, peer) not in self._meetings:
                self._meetings[way, peer] = aside(partial(_post, self._gloo[way], peer), "pipeflow meeting")
            return self._meetings[way, peer]

    def _be_met(self, key: str) -> None:
        """Another rank has read the address of this one in a group, of which `key` is its own."""
        generation, way, *_, peer = key.split("/")
        if int(generation) == self._generation:
            self._meet(way, int(peer))

    def _group_with(self, peer: int, way: str) -> Any:
        """The group of a direction, in which `peer` is connected with this rank. Raises LinkError."""
        meeting = self._meetings.get((way, peer)) or self._meet(way, peer)
        try:
            meeting.result() if meeting.done() else self.monitor.result(meeting, (peer,))
        except RuntimeError as error:
            raise LinkError(peer, "opening channels", expired=self.monitor.expired, why=str(error)) from None
        return self._gloo[way]

    def _met(self, way: str) -> list[int]:
        """The ranks with which this rank is connected in the group of a direction."""
        with self._changing:
            return [peer for (each, peer), meeting in self._meetings.items() if each == way and meeting.done()]

    def connect(self, channels: Iterable[Channel]) -> None:
        """Connects those of `channels` that are not connected, in the order of their turns. Raises LinkError."""
        new = to_connect(channels, self._connected)

        def join() -> None:
            for each in new:
                name = f"nccl-{each.source}-{each.destination}-{each.tag.name}"
                self._connect_nccl(each, name, (each.source, each.destination))

        if new and nccl.serves(self.device):
            with saying("connecting channels"):
                self.monitor.result(aside(join, "pipeflow connecting"))
        self._connected.update(new)

    def _connect_nccl(self, key: Channel | Members, name: str, ranks: tuple[int, ...]) -> None:
        """Makes and connects an NCCL group of `ranks`, in which the source of a channel is rank 0. Raises LinkError."""
        rank, transfers = ranks.index(self.rank), isinstance(key, Channel)
        try:
            group = nccl.make(self._store(name), rank, len(ranks), transfers=transfers)
            self._keep(self._nccl if transfers else self._collective, key, group)
            move = _transfer(group, 1 - rank, 0, sends=not rank) if transfers else group.allreduce
            nccl.connect(group, self.device, move)
        except RuntimeError as error:
            far = ranks[rank - 1]
            raise LinkError(far, "connecting channels", expired=self.monitor.expired, why=str(error)) from None

    def _store(self, name: str, rank: int | None = None) -> MonitorStore:
        """A store that lives as long as this object: torch's groups do not keep one that is written in Python."""
        store = MonitorStore(self.monitor, name, rank)
        self._stores.append(store)
        return store

    def start(self, channel: Channel) -> Start:
        """The function that starts a send if this rank is the source of `channel`, else the one that starts a receive.
        Raises UsageError if the channel is not connected.
        """
        channel.require_connected(self._connected)
        source, destination, tag = channel
        sends = source == self.rank
        if (communicator := channel.communicator) in self._nccl:
            return _transfer(self._nccl[communicator], int(sends), 0, sends=sends)
        peer = destination if sends else source
        group = self._group_with(peer, _UP if destination > source else _DOWN)
        start = _transfer(group, peer, int(tag), sends=sends)
        return partial(_OnHost, start) if nccl.serves(self.device) else start

    def link(self, peer: int) -> ChannelEnd:
        """The link that waits for transfers with `peer`."""
        return ChannelEnd(self, (peer,), "exchanging tensors")

    def collective_link(self, members: Members) -> ChannelEnd:
        """The link that waits for collectives of a group."""
        others = tuple(rank for rank in members.ranks if rank != self.rank)
        return (ChannelEnd if self._over_nccl(members) else EndOfGroup)(self, others, in_collective(members.ranks))

    def _over_nccl(self, members: Members) -> bool:
        return nccl.serves(self.device) and not members.on_host

    def closed(self, peers: Sequence[int]) -> int | None:
        """One of `peers` that has closed its end of a connection over gloo: NCCL moves nothing that is in CPU memory
        (never run on GPUs).
        """
        met = ((group, peer) for way, group in self._gloo.items() for peer in self._met(way) if peer in peers)
        return next((peer for group, peer in met if _is_closed(group, peer)), None)

    def collective(self, members: Members) -> Any:
        """The torch group that computes collectives of `members`, made on first use. Raises LinkError."""
        if members not in self._collective:
            listed = "-".join(map(str, ranks := members.ranks))
            name = f"group-{listed if len(ranks) <= _NAMED else hashlib.sha256(listed.encode()).hexdigest()}"
            with saying(in_collective(ranks)):
                if self._over_nccl(members):
                    joining = partial(self._connect_nccl, members, name, ranks)
                    self.monitor.result(aside(joining, "pipeflow connecting"))
                else:
                    name = f"host-{name}" if members.on_host else name
                    rank, size = ranks.index(self.rank), len(ranks)
                    self._keep(self._collective, members, self._gloo_group(name, rank, size))
                    for peer in (ranks[rank - 1], ranks[(rank + 1) % size]):  # which sees first that this one ends
                        self._meet(_UP if peer > self.rank else _DOWN, peer)
        return self._collective[members]

    def _keep(self, groups: dict[Any, Any], key: object, group: Any) -> None:
        """Stores a group so that `break_all` closes it, too. Raises LinkError if all are already closed."""
        with self._changing:
            groups[key] = group
            if self.is_broken:
                self._close()
                raise LinkError(int(not self.rank))

    def break_all(self) -> None:
        """Closes every connection, which wakes up all waits here and at the other ends."""
        with self._changing:
            if not self.is_broken:
                self.is_broken = True
                self._close()
                if (awaited := self.awaited) is not None:
                    abort(getattr(awaited, "work", awaited))

    def _close(self) -> None:
        over_nccl, together = list[Any](), list[Any]()
        for members, group in self._collective.items():
            (over_nccl if self._over_nccl(members) else together).append(group)
        self._collective.clear()
        self._aborts += nccl.abort([*self._nccl.values(), *over_nccl])
        self._nccl.clear()
        for way, group in self._gloo.items():
            expire(group, self._met(way))
        for group in together:
            expire(group, near(group))
        if together:  # dropping a group waits for gloo's threads, which may wait forever for the rest of a message
            self._dropping.append(aside(together.clear, "pipeflow closing"))

    def settle(self) -> None:
        """Waits until closed groups are gone, or hang: if Python ended while a thread is about to return from gloo, the
        process would abort.
        """
        wait(self._dropping, timeout=_SETTLING)

    def finish(self, seconds: float) -> None:
        """Waits, not longer than this, for transfers that other ranks may still need: to close ends them."""
        if nccl.serves(self.device) and not self.is_broken:
            wait([nccl.finish(self.device)], timeout=seconds)

    def wait_aborted(self) -> None:
        """Waits until closed groups of NCCL are gone, or hang, so that those of the next generation find the device
        free.
        """
        wait(self._aborts, timeout=_SETTLING)


def _transfer(group: Any, peer: int, number: int, *, sends: bool) -> Start:
    return partial(group.send, dstRank=peer, tag=number) if sends else partial(group.recv, srcRank=peer, tag=number)


def near(group: Any) -> list[int]:
    """The ranks of a group of gloo's with which this one is connected if it has computed a collective: its neighbours
    in a ring, and those in trees.
    """
    rank, size = group.rank(), group.size()
    found = [(rank + way * distance) % size for distance, _ in rounds(size) for way in (1, -1)]
    return [peer for peer in dict.fromkeys([*found, 0]) if peer != rank]


def expire(group: Any, peers: Iterable[int]) -> None:
    """Closes a group: gloo closes all connections of a group when a wait expires, so one to a peer is made to expire. A
    group that is already closed does not wait.
    """
    for peer in peers:
        wait([aside(partial(_expire, group, peer), "pipeflow closing")], _AT_ONCE)


def _expire(group: Any, peer: int) -> None:
    _post(group, peer).wait(timedelta(milliseconds=1))


def _post(group: Any, peer: int) -> Any:
    """Posts a receive that no send answers. Unless the two are connected, connects them first, which may block. Raises
    RuntimeError if an end is closed.
    """
    return group.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG)


@dataclass(slots=True, eq=False)
class ChannelEnd:
    """This rank's end of the connections to a peer or to the ranks of a group.

    Args:
        channels: of which these are.
        ranks: of the peers, in the world.
        doing: description of the transfers, for error messages.
    """

    channels: Channels
    ranks: tuple[int, ...]
    doing: str

    def wait(self, works: Iterable[Any]) -> None:
        channels, monitor, deadline = self.channels, self.channels.monitor, self.channels.deadline
        try:
            for work in works:
                monitor.waits += 1
                monitor.waiting = self.ranks
                channels.awaited = work
                if channels.is_broken or not work.wait(*deadline):
                    raise RuntimeError("the channels were closed")
        finally:
            monitor.waiting, channels.awaited = (), None

    def lost(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError):
            return error
        if self.channels.is_broken:
            return LinkError(self.ranks[0], self.doing, expired=self.channels.monitor.expired)
        peer = self.ranks[0] if isinstance(error, dist.DistError) else self.channels.closed(self.ranks)
        return error if peer is None else LinkError(peer, self.doing, why=str(error))


class EndOfGroup(ChannelEnd):
    """This rank's end of collectives over gloo. A wait for one may time out without harm, unlike one for a transfer, so
    it checks regularly whether the channels are broken.
    """

    __slots__ = ()

    def wait(self, works: Iterable[Any]) -> None:
        monitor = self.channels.monitor
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
            if self.channels.is_broken:
                raise
            return work.is_completed() and work.wait() is not None  # or raises its error
        return True


def _is_closed(group: Any, index: int) -> bool:
    """Returns True if the other end has closed. Leaves a receive behind: after an error all channels are dropped."""
    posting = aside(partial(_post, group, index), "pipeflow looking")
    return bool(wait([posting], _AT_ONCE).done) and posting.exception() is not None


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
