"""Processes: measures on this machine with processes that it starts and ends, or in a world that is already there."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive
from pipeflow.engine.parallel.launcher import launch
from pipeflow.tools.calibration.machine_times import Measured
from pipeflow.tools.calibration.measurement import measure

CPU_RANKS = 4  # unless it is said how many
SLOWEST = 10.0  # times the seconds to measure for, so many seconds may pass
STARTING = 120.0  # seconds beside them
GRACE = 5.0  # seconds for the others to end after one has failed
RESULT = "measured"  # file of what rank 0 measured


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
