"""The transport over torch.distributed: gloo between CPUs; NCCL between GPUs, one communicator per ordered pair
and lane, so that a send never queues behind a receive. Headers and agreements always go over gloo.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeflow.core.errors import Failure
from pipeflow.runtime.transport import Lane, Start

_LINGER = 30.0  # seconds; a rank in a long action hears of a failure at its end


class DistributedTransport:
    """Channels between the processes of one pipeline.

    Args:
        store: reachable by every rank, empty under its prefix; `store_host` is the rank whose process serves it.
        rank, size: this process's place in the pipeline.
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

    def _group(self, name: str) -> Any:
        store = dist.PrefixStore(f"generation-{self._generation}/gloo-{name}", self._store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self.timeout))

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
            name = f"generation-{self._generation}/nccl-{source}-{destination}-{lane.name}"
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self.timeout)
            store = dist.PrefixStore(name, self._store)
            self._nccl[key] = dist.ProcessGroupNCCL(store, int(self.rank == destination), 2, options)
        return self._nccl[key]

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
        for communicator in self._nccl.values():
            communicator.abort()
        self._nccl = {}
        self._gloo = []
