"""Rendezvous: lets the processes of a job find each other through the store that torchrun's environment names. Every
start of a job has its own name, so processes that torchrun restarts do not read what earlier ones left in the store.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipeflow.core.errors import Failure, PipelineError, UsageError
from pipeflow.engine.parallel.control.rescue import aside

RUN_ID = "pipeflow run"  # TORCHELASTIC_RUN_ID of ranks that `pipeflow run` started, which do not end together


def resolve(host: str) -> str:
    """The address of `host` as this machine resolves it. Raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def is_loopback(address: str) -> bool:
    """Returns True if `address` can be reached from its own machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable(seen: Sequence[str]) -> str:
    """The first address of `seen` that is no loopback address, or the first of all if each is one. `seen` are the
    addresses that the machines know one machine by.
    """
    return next((address for address in seen if not is_loopback(address)), seen[0])


def address_towards(address: str) -> str:
    """This machine's own address on the route to `address`, which may be itself. Sends nothing."""
    if is_loopback(address):
        return address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def use_interface_of(address: str) -> None:
    """Makes torch's own gloo groups use the network interface of `address`, unless GLOO_SOCKET_IFNAME is set.

    By default they use the interface of the machine's name, which is 127.0.1.1 on many machines.
    """
    name = "lo" if is_loopback(address) and sys.platform == "linux" else _interface(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _interface(address: str) -> str | None:
    """The name that Linux gives to the interface with this IPv4 address."""
    if sys.platform != "linux" or ":" in address:
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]  # SIOCGIFADDR
                if socket.inet_ntoa(found) == address:
                    return name
    return None


_PAUSE = 0.01  # seconds between two checks, at first
_MARGIN = 1.0  # seconds by which rank 0 decides earlier than the others


def find_each_other(rank: int, size: int, timeout: float) -> tuple[dist.Store, str]:
    """Waits until all ranks have joined. The result: a store for this start of the job, and the address of rank 0's
    machine.

    Raises PipelineError, naming the missing ranks, after `timeout` seconds, and UsageError if the environment does not
    name the store.
    """
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UsageError("a world of several processes needs MASTER_ADDR and MASTER_PORT; torchrun sets them") from None
    meeting = aside(lambda: _Meeting(host, port, rank, size, timeout).hold(), "pipeflow rendezvous")
    if not wait([meeting], timeout + 2 * _MARGIN).done:  # torch's stores may wait forever for one that hangs
        raise did_not_come([0], timeout)
    return meeting.result()


def come(store: dist.Store, rank: int) -> None:
    """Records that rank `rank` is present: `launch` succeeded there, or it is about to raise an error."""
    with suppress(dist.DistError):
        store.set(f"after/{rank}", "")


def missing(store: dist.Store, rank: int, size: int, until: float) -> list[int]:
    """The ranks that, after a failure, have not called `come` before `until`, a time of the monotonic clock."""

    def look() -> list[int]:
        """Rank 0 looks, and tells the others."""
        try:
            if rank == 0:
                absent = _absent(store, "after", range(size), until)
                store.set("absent", json.dumps(absent))
                time.sleep(_MARGIN)  # this process may serve the store, and ends next
                return absent
            if _has(store, ["absent"], until + _MARGIN):
                return list(json.loads(store.get("absent")))
            return [] if store.check(["after/0"]) else [0]
        except dist.DistError:
            return [0]

    come(store, rank)
    looking = aside(look, "pipeflow rendezvous")
    return looking.result() if wait([looking], until + 2 * _MARGIN - time.monotonic()).done else [0]


def did_not_come(ranks: Sequence[int], seconds: float) -> PipelineError:
    """A PipelineError that names the missing ranks."""
    listed = "it" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    reason = (
        f"{listed} did not join within {seconds:g} s of launch: check that rank's own output, and that its machine "
        "reaches MASTER_ADDR; launch(timeout=) sets how long to wait"
    )
    return PipelineError(Failure(ranks[0], reason))


class _Meeting:
    """One rank's part of the rendezvous."""

    def __init__(self, host: str, port: int, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.seen = resolve(host)  # rank 0's machine, as this machine resolves it
        self.ticket = secrets.token_hex(8)
        self.where = host, port
        self.store: Any = self._join(host, port)  # torch's stubs lack methods

    def _join(self, host: str, port: int) -> dist.Store:
        """The store of torchrun, or a store that rank 0 serves."""
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            if serves:
                return serve(host, port, self.size, self.timeout)
            patience = timedelta(seconds=self.timeout)
            return dist.TCPStore(host, port, self.size, is_master=False, wait_for_workers=False, timeout=patience)
        except (OSError, RuntimeError) as error:
            if serves:
                raise UsageError(f"rank 0 cannot serve a store at {host}:{port}: {error}") from None
            raise did_not_come([0], self.timeout) from None

    def hold(self) -> tuple[dist.Store, str]:
        while True:
            try:
                return self._call() if self.rank == 0 else self._answer()
            except dist.DistError:  # who serves the store is gone; it may be about to launch again, as this rank does
                if self.rank == 0 or time.monotonic() > self.deadline:
                    raise did_not_come([0], self.timeout) from None
                self.store = self._join(*self.where)

    def _call(self) -> tuple[dist.Store, str]:
        """Run on rank 0: names this start of the job, waits for the others, and publishes who is present."""
        life = self.ticket
        self.store.set("pipeflow/life", life)
        absent = _absent(self.store, f"pipeflow/{life}", range(1, self.size), self.deadline)
        here = [rank for rank in range(1, self.size) if rank not in absent]
        answers = self.store.multi_get([f"pipeflow/{life}/{rank}" for rank in here]) if here else []
        said = [json.loads(answer) for answer in answers]
        address = reachable([self.seen, *(each["seen"] for each in said)])
        go = json.dumps({"address": address, "absent": absent})
        if said:
            self.store.multi_set([f"pipeflow/{life}/go/{each['ticket']}" for each in said], [go] * len(said))
        if absent:
            time.sleep(_MARGIN)  # this process may serve the store, and ends next
        return self._found(life, address, absent)

    def _answer(self) -> tuple[dist.Store, str]:
        """Run on all other ranks. Entries of an earlier start of the job may be in the store; they lack this rank's
        ticket. So it looks again and again, the more seldom the longer it has waited.
        """
        life, begun = "", time.monotonic()
        while (now := time.monotonic()) < self.deadline + _MARGIN:
            if life and self.store.check([f"pipeflow/{life}/go/{self.ticket}"]):
                go = json.loads(self.store.get(f"pipeflow/{life}/go/{self.ticket}"))
                return self._found(life, go["address"], go["absent"])
            if self.store.check(["pipeflow/life"]) and (named := self.store.get("pipeflow/life").decode()) != life:
                life = named
                self.store.set(f"pipeflow/{life}/{self.rank}", json.dumps({"ticket": self.ticket, "seen": self.seen}))
            time.sleep(min(max(_PAUSE, (now - begun) / 10), _MARGIN))
        raise did_not_come([0], self.timeout)

    def _found(self, life: str, address: str, absent: list[int]) -> tuple[dist.Store, str]:
        if absent:
            raise did_not_come(absent, self.timeout)
        return dist.PrefixStore(f"pipeflow/{life}", self.store), address


def _absent(store: dist.Store, prefix: str, ranks: Sequence[int], until: float) -> list[int]:
    """Those of `ranks` whose keys do not exist before `until`, a time of the monotonic clock."""
    if _has(store, [f"{prefix}/{rank}" for rank in ranks], until):
        return []
    return [rank for rank in ranks if not store.check([f"{prefix}/{rank}"])]


def _has(store: dist.Store, keys: list[str], until: float) -> bool:
    """Waits until all keys exist; returns False if they do not before `until`."""
    try:
        store.wait(keys, timedelta(seconds=max(until - time.monotonic(), _PAUSE)))
    except dist.DistStoreError:
        return False
    return True


def serve(host: str, port: int, size: int, timeout: float = 300.0) -> dist.TCPStore:
    """A store for `size` processes that this process serves at `host`, on any free port if `port` is 0. Its operations
    wait for `timeout` seconds. Raises OSError or RuntimeError.
    """
    listening = _listen(host, resolve(host), port)
    port, patience = listening.getsockname()[1], timedelta(seconds=timeout)
    options: dict[str, Any] = {"master_listen_fd": listening.detach()}
    return dist.TCPStore(host, port, size, is_master=True, wait_for_workers=False, timeout=patience, **options)


def _listen(host: str, address: str, port: int) -> socket.socket:
    """Listens at the address of `host` alone, or at all addresses if this machine resolves its own name to a loopback
    address, which other machines do not.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    hidden = is_loopback(address) and host not in (address, "localhost")
    try:
        return socket.create_server(("" if hidden else address, port), family=family, backlog=1024)
    except OSError as error:
        if hidden or error.errno != 99:  # the address is another machine's, such as a gateway's
            raise
        return socket.create_server(("", port), family=family, backlog=1024)
