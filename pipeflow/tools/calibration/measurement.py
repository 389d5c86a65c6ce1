"""Measure: everything that is measured on a machine, in the order in which every rank does it, by processes that are
started here and ended, or in a world that is already there.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive
from pipeflow.engine.parallel.context import Context
from pipeflow.engine.parallel.launcher import launch
from pipeflow.tools.calibration import computing, links
from pipeflow.tools.calibration.machine import Stopwatch, device_name, memory_bytes, precisions, runs_ahead, sharing
from pipeflow.tools.calibration.machine_times import Measured

BUDGET: Mapping[str, float] = MappingProxyType(
    {
        "products": 0.14,
        "moved": 0.05,
        "attention": 0.05,
        "layers": 0.3,
        "launches": 0.04,
        "optimizer": 0.03,
        "sums": 0.13,
        "steps": 0.1,
        "gradients": 0.06,
        "transfers": 0.06,
        "host": 0.04,
    }
)
"""Shares of the time that measuring takes."""
CPU_RANKS = 4  # unless it is said how many
SLOWEST = 10.0  # times the seconds to measure for, so many seconds may pass
STARTING = 120.0  # seconds beside them
GRACE = 5.0  # seconds for the others to end after one has failed
RESULT = "measured"  # file of what rank 0 measured


def measure(
    context: Context,
    seconds: float,
    *,
    per_node: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Measures the machine on which this world runs, in about `seconds` seconds. All ranks call it together, and it
    returns the same on all of them.

    Args:
        context: this rank's place.
        seconds: time to measure for.
        per_node: ranks in each node; by default LOCAL_WORLD_SIZE if it is set, otherwise all ranks.
        clock: seconds since any moment.

    One rank measures no links. Raises UsageError for ranks that do not divide into nodes of two or more.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", context.world_size)) if per_node is None else per_node
    alone = context.world_size == 1
    if not alone and (per_node < 2 or context.world_size % per_node):
        raise UsageError(
            f"{context.world_size} ranks with {per_node} in each node: links inside a node and between nodes are both "
            "measured, so start the same number on each node, 2 or more"
        )
    watch, known = Stopwatch(context, clock=clock), precisions(context.device)
    budget = {name: share * seconds for name, share in BUDGET.items()}
    main = known[0]
    forward, backward = computing.launches(watch, main, budget["launches"])
    copies, elementwise = computing.moved(watch, main, budget["moved"])
    near, far = ([], []) if alone else links.transfers(watch, per_node, budget["transfers"])
    return Measured(
        device=device_name(context.device, per_node),
        memory_bytes=memory_bytes(context.device, per_node),
        devices_per_node=per_node,
        precision=main,
        products=tuple(computing.products(watch, known, budget["products"])),
        copies=tuple(copies),
        elementwise=tuple(elementwise),
        attention=tuple(computing.attention(watch, main, budget["attention"])),
        layers=tuple(computing.layers(watch, main, budget["layers"])),
        optimizer=tuple(computing.optimizer(watch, budget["optimizer"])),
        sums=() if alone else tuple(links.sums(watch, per_node, budget["sums"])),
        gradient_sums=() if alone else tuple(links.gradient_sums(watch, per_node, budget["gradients"])),
        transfers=tuple(near),
        far_transfers=tuple(far),
        steps=() if runs_ahead(context.device) else tuple(computing.steps(watch, budget["steps"])),
        forward_launch=forward,
        backward_launch=backward,
        sync=0.0 if alone else links.sync_seconds(watch, per_node, budget["launches"] / 2),
        sharing=sharing(context.device, per_node),
        runs_ahead=runs_ahead(context.device),
        host=tuple(links.host_copies(watch, budget["host"])),
    )


def measured_here(ranks: int | None, device: str | None, seconds: float) -> Measured:
    """Starts `ranks` processes on this machine, and returns what they measure. On return none of them is left.

    Args:
        ranks: number of processes; by default the number of GPUs, or 4 on a CPU.
        device: "cuda" or "cpu"; by default "cuda" if there is a GPU.
        seconds: time to measure for; starting takes longer.

    Raises UsageError for a device that does not exist, for less than one rank, and for more ranks than GPUs. Also
    raises it if a process fails or does not end in time.
    """
    device = device_type(device)
    ranks = ranks_on(device, ranks)
    context: Any = None
    with tempfile.TemporaryDirectory() as folder, _threads():
        try:
            arguments = (ranks, device, seconds, _free_port(), folder)
            context = torch.multiprocessing.start_processes(_measure_rank, arguments, ranks, join=False, daemon=True)
            _wait(context, SLOWEST * seconds + STARTING)
            measured: Measured = pickle.loads(Path(folder, RESULT).read_bytes())
            return measured
        finally:
            for process in context.processes if context is not None else ():
                process.kill()
                process.join()


def measured_in_world(device: str | None, seconds: float) -> tuple[int, Measured]:
    """Measures in the world that torchrun has started; returns this process's rank, and what all of them measured.
    Raises UsageError as `measured_here` does.
    """
    context = launch(device=None if device is None else device_type(device))
    try:
        return context.rank, measure(context, seconds)
    finally:
        context.close()


def device_type(asked: str | None) -> str:
    """The device to measure. Raises UsageError for a device that is unknown or does not exist."""
    if asked not in (None, "cpu", "cuda"):
        raise UsageError(f"unknown device {asked!r}: use cpu or cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no GPU on this machine: use the device cpu")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def ranks_on(device: str, asked: int | None) -> int:
    """The number of processes. Raises UsageError for less than one, and for more than the number of GPUs."""
    there = torch.cuda.device_count() if device == "cuda" else CPU_RANKS
    ranks = there if asked is None else asked
    require_positive(ranks=ranks)
    if device == "cuda" and ranks > there:
        raise UsageError(f"{ranks} ranks need a GPU each, and there are {there}")
    return ranks


def _measure_rank(rank: int, ranks: int, device: str, seconds: float, port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        number, measured = measured_in_world(device, seconds)
        if number == 0:
            Path(folder, RESULT).write_bytes(pickle.dumps(measured))
    finally:
        atexit._run_exitfuncs()  # which the exit of a multiprocessing child leaves out


def _wait(context: Any, seconds: float) -> None:
    """Waits until all processes have ended. Raises UsageError if one of them fails, or `seconds` pass."""
    until = time.monotonic() + seconds
    try:
        while not context.join(max(0.0, until - time.monotonic()), GRACE):
            if time.monotonic() >= until:
                raise UsageError(
                    f"the processes that measure did not end within {seconds:.0f} s: end other programs that compute "
                    "on this machine, or measure with fewer ranks; if it is idle, see whether its processes reach each "
                    "other (GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO)"
                )
    except ProcessException as error:
        reason = error.msg.strip().splitlines()[-1]
        raise UsageError(f"a process that measures failed: {reason}") from None


@contextmanager
def _threads() -> Iterator[None]:
    """Context manager in which started processes compute with as many threads as torchrun gives them: one, unless
    OMP_NUM_THREADS says otherwise.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
