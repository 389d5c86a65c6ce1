"""Launches at scale: the bytes that a rank moves from its launch to the end of its first step, counted at its sockets;
how they grow with the number of ranks; the seconds that a launch takes once all processes have loaded torch; and the
communicators that a rank would connect over NCCL, in as many rounds.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from benchmarks.processes import run_ranks
from benchmarks.report import Report

RANKS = (8, 16, 32)
WIDTH = 8
FAR = 1024  # ranks
_MOMENTS = ("launch", "pipeline", "step")
_SENT, _RECEIVED = 200, 128  # where Linux's tcp_info has the bytes: tcpi_bytes_sent, tcpi_bytes_received


def run(rounds: int | None = None) -> Report:
    rounds = rounds or 1
    title = (
        f"launch: bytes through a rank until the end of its first step, 1F1B, a linear layer a rank, {rounds} rounds"
    )
    columns = ["ranks", "rank 0 MB", "store", "control", "other", "growth", "busiest other MB", "growth", "launch s"]
    report = Report("launch", title, columns)
    for lazy in (False, True):
        _add(report, rounds, lazy=lazy)
    report.notes.append("lazy: with TORCH_GLOO_LAZY_INIT=1; without it, torch's default group connects all ranks")
    report.notes.append("target: a growth of at most 2.4, and less than 50 MB")
    for name in ("1f1b", "zb-v", "dualpipe"):
        for shapes in ("known", "learned"):
            orders = connected(name, shapes)
            many, rounds = max(map(len, orders)), len(rounds_of(orders))
            report.notes.append(f"{name}, {len(orders)} ranks, shapes {shapes}: {many} communicators, {rounds} rounds")
    return report


def _add(report: Report, rounds: int, *, lazy: bool) -> None:
    """A row for each number of ranks, and how far the last growth leads."""
    label = ", lazy" * lazy
    before: tuple[float, float] | None = None
    factors = (0.0, 0.0)
    for ranks in RANKS:
        found = [_measured(ranks, lazy=lazy) for _ in range(rounds)]
        hosts = [each["host"] for each in found]
        host, busiest, seconds = (
            statistics.median(each)
            for each in (map(total, hosts), (each["busiest"] for each in found), (each["seconds"] for each in found))
        )
        shares = [
            f"{statistics.median(each[kind] for each in hosts) / 1e6:.3f}" for kind in ("store", "control", "other")
        ]
        factors = (0.0, 0.0) if before is None else (host / before[0], busiest / before[1])
        grown = [f"{factor:.2f}" if factor else "" for factor in factors]
        texts = [f"{host / 1e6:.3f}", *shares, grown[0], f"{busiest / 1e6:.3f}", grown[1], f"{seconds:.2f}"]
        report.rows.append([f"{ranks}{label}", *texts])
        report.data[f"{ranks}{label}"] = found
        before = host, busiest
    doublings = (FAR // RANKS[-1]).bit_length() - 1
    assert before is not None
    far = [f"{now * factor**doublings / 1e6:.3g} MB" for now, factor in zip(before, factors, strict=True)]
    report.notes.append(f"with the last growth, {FAR} ranks{label}: rank 0 {far[0]}, the busiest other {far[1]}")


def connected(name: str, shapes: str) -> list[list[Any]]:
    """The communicators that each of 8 ranks connects for transfers until its second step, in order."""
    from pipeflow.testing import run_threads

    return run_threads(_connect, 8, name, shapes)


def _connect(name: str, shapes: str) -> list[Any]:
    import torch
    from torch import nn

    import pipeflow
    from pipeflow.engine.parallel.context import current_context
    from pipeflow.engine.parallel.transport.local import LocalTransport
    from pipeflow.engine.parallel.transport.protocol import to_connect

    order: list[Any] = []

    class Counting(LocalTransport):
        def connect(self, channels: Any) -> None:
            new = to_connect(channels, self._connected)
            order.extend(new)
            super().connect(new)

    context = current_context()
    context.world.__class__ = Counting
    schedule = pipeflow.make_schedule(name, ranks=8, microbatches=16)
    stages = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in schedule.placement.stages_of(context.pipeline_rank))
    known: Any = {"tensor_shape": (1, WIDTH), "tensor_dtype": torch.float32} if shapes == "known" else {}
    model = pipeflow.Pipeline(stages, schedule, criterion=nn.functional.mse_loss, **known)
    for _ in range(2):
        pipeflow.execute_pipeline(iter([(torch.zeros(16, WIDTH), torch.zeros(16, WIDTH))]), model)
    return order


def rounds_of(orders: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The communicators that are connected at the same time, round after round, if each rank connects its own one after
    the other, in its order, and all take equally long.
    """
    left = [deque(order) for order in orders]
    rounds: list[list[Any]] = []
    while any(left):
        heads = Counter(order[0] for order in left if order)
        rounds.append([communicator for communicator, ends in heads.items() if ends == 2])
        if not rounds[-1]:
            raise ValueError("ranks wait for each other in a circle")
        for order in left:
            if order and order[0] in rounds[-1]:
                order.popleft()
    return rounds


def total(found: dict[str, float]) -> float:
    return sum(found.values())


def _measured(ranks: int, *, lazy: bool) -> dict[str, Any]:
    """Of rank 0, and of the rank among the others that moves most; the seconds of the slowest launch."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"folder": folder, "lazy": lazy, "launch": {"timeout": 300.0}}
        results = run_ranks("launch:measure", ranks, options, deadline=500.0)
    of_steps = [each["bytes"]["step"] for each in results]
    return {
        "host": of_steps[0],
        "busiest": max(map(total, of_steps[1:])),
        "seconds": max(each["seconds"] for each in results),
        "moments": {moment: total(results[0]["bytes"][moment]) for moment in _MOMENTS},
    }


def measure(folder: str, lazy: bool) -> dict[str, Any]:
    """On every rank: launches again, once all processes are there, and trains a step. If `lazy`, torch's own group
    connects two ranks only when both use their connection.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    import pipeflow
    from pipeflow.engine.parallel.context import current_context

    ranks = current_context().world_size
    current_context().close()
    dist.destroy_process_group()
    Path(folder, os.environ["RANK"]).touch()
    while len(os.listdir(folder)) < ranks:
        time.sleep(0.05)
    while os.environ["RANK"] != "0" and not _is_served():
        time.sleep(0.01)
    known = set(_sockets())
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    start = time.monotonic()
    context = pipeflow.launch(timeout=300.0)
    seconds, moved = time.monotonic() - start, {"launch": _moved(known, context.world)}
    schedule = pipeflow.make_schedule("1f1b", ranks=ranks, microbatches=4)
    model = pipeflow.Pipeline(nn.Linear(WIDTH, WIDTH), schedule, criterion=nn.functional.mse_loss)
    moved["pipeline"] = _moved(known, context.world)
    pipeflow.execute_pipeline(iter([(torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))]), model)
    moved["step"] = _moved(known, context.world)
    Path(folder, f"{os.environ['RANK']} ended").touch()
    while len(os.listdir(folder)) < 2 * ranks:  # else those that leave are counted, too
        time.sleep(0.05)
    context.close()
    return {"seconds": seconds, "bytes": moved}


def _is_served() -> bool:
    """Whether rank 0 has begun to serve the store; a rank that comes before tries again only after half a second."""
    with socket.socket() as probe:
        return probe.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) == 0


def _moved(known: set[str], world: Any) -> Counter[str]:
    """The bytes that were sent and received on the sockets that are open, but for the `known` ones, by what they are
    for: torch's store, the control of all ranks, or other messages.
    """
    ports = {int(os.environ["MASTER_PORT"]): "store", world.monitor._socket.getpeername()[1]: "control"}
    moved = Counter(dict.fromkeys(("store", "control", "other"), 0))
    for name, descriptor in _sockets().items():
        with suppress(OSError), closing(socket.socket(fileno=os.dup(descriptor))) as connection:
            if name in known or connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                continue
            ends = [connection.getsockname()[1], connection.getpeername()[1]]
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            [sent], [received] = struct.unpack_from("<Q", info, _SENT), struct.unpack_from("<Q", info, _RECEIVED)
            kind = next((ports[end] for end in ends if end in ports), "other")
            moved[kind] += sent + received
    return moved


def _sockets() -> dict[str, int]:
    """The descriptors of this process that are sockets, by what Linux calls them."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found
