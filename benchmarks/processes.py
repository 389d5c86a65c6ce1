"""Runs one function in R processes with a deadline. Must not contain: torch, or what is measured."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class BenchmarkError(RuntimeError):
    """A rank failed or did not end in time; what every rank printed went to standard error."""


class Place(NamedTuple):
    """Where a rank runs: in which network namespace, and the address of rank 0 as seen from there."""

    namespace: str
    address: str


def run_ranks(
    function: str, ranks: int, options: dict[str, Any], deadline: float, *, places: Sequence[Place] = ()
) -> list[Any]:
    """Calls `function` ("module:name", of this package) as `name(**options)` in `ranks` processes, all of them here
    unless each has a place. They are one pipeline, unless an option "launch" has other arguments of pipeflow.launch.

    Returns what each rank returned, as JSON carries it. When a rank fails, or after `deadline` seconds, every
    rank that still runs prints its stacks and is ended, and BenchmarkError is raised.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        paths = [Path(folder, f"rank{rank}") for rank in range(ranks)]
        port = _free_port()
        processes = [_start(function, rank, ranks, options, port, path, places) for rank, path in enumerate(paths)]
        try:
            problem = _wait(processes, time.monotonic() + deadline)
        finally:
            _end(processes)
        if problem is not None:
            for rank, path in enumerate(paths):
                lines = path.with_suffix(".log").read_text(encoding="utf-8").splitlines()
                print(f"--- rank {rank}", *lines[-40:], sep="\n", file=sys.stderr)
            raise BenchmarkError(f"{function}: {problem}")
        return [json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) for path in paths]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _start(
    function: str,
    rank: int,
    ranks: int,
    options: dict[str, Any],
    port: int,
    path: Path,
    places: Sequence[Place],
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": places[rank].address if places else "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    result = path.with_suffix(".json")
    command = ["ip", "netns", "exec", places[rank].namespace] if places else []
    command += [sys.executable, "-m", "benchmarks.worker", function, json.dumps(options), str(result)]
    with path.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]], until: float) -> str | None:
    """None when every process ended well in time, else what went wrong."""
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            time.sleep(2)  # the others may want to say something about it
            return f"rank {failed[0]} ended with exit status {codes[failed[0]]}"
        if None not in codes:
            return None
        time.sleep(0.05)
    return "the deadline passed"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Lets the processes that still run print their stacks, then ends them: these processes and no others."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGUSR1)
    if running:
        time.sleep(1)
    for process in running:
        process.kill()
        process.wait()
