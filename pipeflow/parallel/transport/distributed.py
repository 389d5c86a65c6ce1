"""The transport over torch.distributed: gloo between CPUs; NCCL between GPUs, one communicator per ordered pair
and lane, so that a send never queues behind a receive. Headers and agreements always go over gloo.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeflow.core.errors import Failure
from pipeflow.parallel.transport.distributed_group import DistributedGroup
from pipeflow.parallel.transport.group import Alone, Group
from pipeflow.parallel.transport.protocol import Lane, Start

_LINGER = 30.0  # seconds; a rank in a long action hears of a failure at its end


class DistributedTransport:
    """Channels between the processes of a world, and groups of them.

    Args:
        store: reachable by every rank, empty under its prefix; `store_host` is the rank whose process serves it.
        rank, size: this process's place.
        device: where activations live; a CUDA device selects NCCL.
        timeout: seconds until a wait gives up.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, size: int, device: torch.device, timeout: float, store_host: int = 0
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = timeout
        self._store = store
        self._store_host = store_host
        self._generation = 0
        self._told: Failure | None = None
        self._open()

    def _open(self) -> None:
        # One group for what goes to higher ranks and one for what goes to lower ones: a gloo connection with traffic
        # both ways keeps its thread spinning. Typed Any since torch's stubs know neither send nor recv of a group.
        self._gloo: list[Any] = [self._group(direction) for direction in ("down", "up")]
        self._nccl: dict[tuple[int, int, Lane], Any] = {}
        self._collective: dict[tuple[int, ...], Any] = {}

    def _group(self, name: str) -> Any:
        return dist.ProcessGroupGloo(
            self._store_of(f"gloo-{name}"), self.rank, self.size, timedelta(seconds=self.timeout)
        )

    def _store_of(self, name: str) -> dist.Store:
        return dist.PrefixStore(f"generation-{self._generation}/{name}", self._store)

    def world_rank(self, peer: int) -> int:
        return peer

    def sender(self, peer: int, lane: Lane) -> Start:
        if self.device.type == "cuda" and not lane.on_host:
            return partial(self._communicator(self.rank, peer, lane).send, dstRank=1, tag=0)
        return partial(self._gloo[peer > self.rank].send, dstRank=peer, tag=lane)

    def receiver(self, peer: int, lane: Lane) -> Start:
        if self.device.type == "cuda" and not lane.on_host:
            return partial(self._communicator(peer, self.rank, lane).recv, srcRank=0, tag=0)
        return partial(self._gloo[self.rank > peer].recv, srcRank=peer, tag=lane)

    def _communicator(self, source: int, destination: int, lane: Lane) -> Any:
        """The NCCL communicator of an ordered pair, in which the source is rank 0 and the destination rank 1."""
        key = (source, destination, lane)
        if key not in self._nccl:
            store = self._store_of(f"nccl-{source}-{destination}-{lane.name}")
            self._nccl[key] = self._nccl_group(store, int(self.rank == destination), 2)
        return self._nccl[key]

    def _nccl_group(self, store: dist.Store, rank: int, size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout)
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def group(self, ranks: Sequence[int]) -> Group:
        return DistributedGroup(self, tuple(ranks)) if len(ranks) > 1 else Alone()

    def collective(self, ranks: tuple[int, ...]) -> Any:
        """What torch computes collectives of `ranks` with; made when it is first asked for after a (re)opening."""
        if ranks not in self._collective:
            store, rank = self._store_of(f"group-{'-'.join(map(str, ranks))}"), ranks.index(self.rank)
            if self.device.type == "cuda":
                self._collective[ranks] = self._nccl_group(store, rank, len(ranks))
            else:
                timeout = timedelta(seconds=self.timeout)
                self._collective[ranks] = dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
        return self._collective[ranks]

    def report(self, failure: Failure) -> Failure:
        key = f"failure-{self._generation}"
        try:
            first = self._store.compare_set(key, "", json.dumps(asdict(failure)))
            self._told = Failure(**json.loads(first))
            self._store.add(f"heard-{self._generation}", 1)
        except Exception:  # the store fails in its own ways, all of which mean that its host is gone
            reason = f"the store that it served no longer answers (seen by rank {self.rank})"
            self._told = Failure(rank=self._store_host, reason=reason, died=self._store_host)
        self.close()
        return self._told

    def reopen(self) -> None:
        if self._told is not None:
            self._told = None
            self._generation += 1
            self._open()

    def leave(self) -> None:
        """Closes at the end of the process. The store's host stays until all have read why the step failed."""
        self.close()
        if self._told is None or self._told.died is not None or self.rank != self._store_host:
            return
        deadline = time.monotonic() + _LINGER
        while self._store.add(f"heard-{self._generation}", 0) < self.size and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        if self.device.type == "cuda":  # gloo's are closed when nobody holds them
            for communicator in (*self._nccl.values(), *self._collective.values()):
                communicator.abort()
        self._nccl, self._collective = {}, {}
        self._gloo = []
