"""A stub of torch's ProcessGroupNCCL, which needs GPUs: it checks NCCL's rules and moves CPU tensors over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeflow import launch
from pipeflow.engine.parallel.context import Context, current_context
from pipeflow.engine.parallel.transport import nccl
from pipeflow.engine.parallel.transport.agreement import all_gather

DAYS = timedelta(days=1)
HOST = torch.device("cpu")


class Told:
    """What the groups of this process were told, in order."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []  # names and options
        self.connected: list[str] = []
        self.current = threading.local()  # the current device of each thread
        self.changed = threading.Condition()
        self.live: list[Stub] = []
        self.aborting: list[Stub] = []
        self.wrong: list[str] = []
        self.finished = 0

    def set_device(self, device: torch.device) -> None:
        self.current.device = device

    def synchronize(self, device: torch.device) -> None:
        self.finished += device == HOST

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)
            raise AssertionError(what)


TOLD = Told()


class Settings:
    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=None, cga_cluster_size=None)


class Stub:
    """A group, of which every rank must connect before one of them can move anything."""

    Options = Settings

    def __init__(self, store: Any, rank: int, size: int, options: Settings) -> None:
        self.place = dist.PrefixStore("", store), rank, size  # like torch's class, which keeps no Python object
        self.name = store._prefix
        self.gloo: Any = None
        self.calls = 0
        TOLD.require(options._timeout >= DAYS, f"{self.name} has a timeout of {options._timeout}")
        TOLD.made.append((self.name, options.config))

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Returns when all ranks of the group have called it."""
        TOLD.require(device == HOST, f"{self.name} connects on {device}")
        TOLD.require(getattr(TOLD.current, "device", None) == device, f"{self.name} connects on another current device")
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = DAYS
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self.gloo = gloo(*self.place, options)
        with TOLD.changed:
            TOLD.connected.append(self.name)
            TOLD.live.append(self)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:  # noqa: N803  # torch's name
        return self._call("send", tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Any:  # noqa: N803  # torch's name
        return self._call("recv", tensors, srcRank, tag)

    def allreduce(self, *arguments: Any) -> Any:
        return self._call("allreduce", *arguments)

    def broadcast(self, *arguments: Any) -> Any:
        return self._call("broadcast", *arguments)

    def _allgather_base(self, *arguments: Any) -> Any:
        return self._call("_allgather_base", *arguments)

    def _reduce_scatter_base(self, *arguments: Any) -> Any:
        return self._call("_reduce_scatter_base", *arguments)

    def alltoall_base(self, *arguments: Any) -> Any:
        return self._call("alltoall_base", *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The first call is that of `connect`, on a thread of its own: no other may come before it."""
        TOLD.require(self.gloo is not None, f"{self.name} is used before it is connected")
        if not self.calls:
            TOLD.require(threading.current_thread().name == "pipeflow connecting", f"a step connects {self.name}")
        self.calls += 1
        return getattr(self.gloo, name)(*arguments)

    def abort(self) -> None:
        """Ends when all groups of this process are being aborted, like an abort that waits for the whole device."""
        with TOLD.changed:
            TOLD.aborting.append(self)
            TOLD.changed.notify_all()
            together = TOLD.changed.wait_for(lambda: all(group in TOLD.aborting for group in TOLD.live), 5.0)
        TOLD.require(together, "aborts wait for each other")
        if self.gloo is not None:
            for peer in range(self.gloo.size()):
                if peer != self.gloo.rank():
                    try:
                        self.gloo.recv([torch.empty(1)], peer, 7).wait(timedelta(milliseconds=1))
                    except RuntimeError:
                        continue
        with TOLD.changed:
            TOLD.live = [group for group in TOLD.live if group is not self]


def launch_over_stub(patch: Callable[[pytest.MonkeyPatch], None] = lambda _: None, **options: Any) -> Context:
    """Launches this process again, in a world whose tensors go over the stub."""
    all_gather(current_context().world, [0.0])  # when all have been launched
    current_context().close()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(nccl, "DEVICE", "cpu")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Stub, raising=False)
    monkeypatch.setattr(torch.cpu, "set_device", TOLD.set_device)
    monkeypatch.setattr(torch.cpu, "synchronize", TOLD.synchronize)
    patch(monkeypatch)
    return launch(**options)
