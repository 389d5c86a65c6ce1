"""The command `python -m pipeflow.testing.gpu`: checks all that training needs of this machine, and prints a report to
send back. It starts a process for each GPU, or runs in the world that torchrun has started; on one GPU, ranks are
threads.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

import pipeflow
from pipeflow.engine.parallel.device import DEFAULTS
from pipeflow.engine.parallel.launcher import launch
from pipeflow.testing.machine_checks import Check, checks, of_all
from pipeflow.testing.ranks import run_threads

RANKS = 4  # on a CPU, and of threads
TIMEOUT = 60.0  # seconds
_NO_GPU = (
    "torch finds no GPU on this machine; run this command where there are GPUs, or add --device cpu to run the same "
    "checks between processes on the CPU"
)


class CheckResult(NamedTuple):
    """The result of a check on one rank: a note, or the text of the error."""

    note: str
    error: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 1 if a check failed or none was run, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeflow.testing.gpu",
        description="Check that training works on the GPUs of this machine (or, under torchrun, of several), and print "
        "a report: hardware, versions, what passed, and times.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs the same checks over gloo")
    parser.add_argument("--ranks", type=int, help="processes on this machine; by default one per GPU, on a CPU 4")
    parser.add_argument("--threads", action="store_true", help="ranks are 4 threads that share a device, as on one GPU")
    parser.add_argument("--only", default="", help="run only checks whose name contains this text")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write(f"{_NO_GPU}\n")
        return 2
    if asked.threads and asked.ranks:
        parser.error(f"--threads starts {RANKS} threads: leave out --ranks")
    if "RANK" in os.environ:
        return _run(asked.device, asked.only)
    ranks = asked.ranks or (torch.cuda.device_count() if asked.device == "cuda" else RANKS)
    if asked.threads or ranks == 1:
        return _run_threads(asked.device, asked.only)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "pipeflow.testing.gpu", f"--device={asked.device}", f"--only={asked.only}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return min(1, subprocess.run(command, env=environment, check=False).returncode)


def _run(device: str, only: str) -> int:
    """Run in every process: runs the checks, one layout after the other; rank 0 prints the report."""
    write = _write if os.environ["RANK"] == "0" else lambda *_: None
    chosen = [check for check in checks(int(os.environ["WORLD_SIZE"])) if only in check.name]
    before, failed = _environment(), 0
    for number, ((pipeline, tensor), together) in enumerate(groupby(chosen, key=lambda check: check[1:3])):
        context = launch(pipeline, tensor, device=device, timeout=TIMEOUT)
        if number == 0:
            write(*_header(of_all((socket.gethostname(), _device_name(context.device))), context.device, before))
        for check in together:
            told = [CheckResult(*result) for result in of_all(tuple(_result(check)))]
            failed += any(result.error for result in told)
            write(_line(check, told))
        context.close()
    return _conclude(failed, len(chosen)) if os.environ["RANK"] == "0" else 0


def _run_threads(device: str, only: str) -> int:
    """Runs the checks with ranks as threads, without tensor ranks, because threads share autograd's threads."""
    place = torch.device(device)
    chosen = [check for check in checks(RANKS) if only in check.name and check.tensor == 1]
    _write(*_header([(socket.gethostname(), _device_name(place))] * RANKS, place, _environment()))
    failed = 0
    for check in chosen:
        told = run_threads(_result, RANKS, check, device=device, data=RANKS // check.pipeline)
        failed += any(result.error for result in told)
        _write(_line(check, told))
    return _conclude(failed, len(chosen))


def _conclude(failed: int, count: int) -> int:
    """Writes the last line and returns the exit status."""
    if not count:
        _write("", "no check has the text of --only in its name: leave it out to see all names")
        return 1
    _write(f"{count - failed} of {count} checks passed")
    return min(1, failed)


def _write(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _result(check: Check) -> CheckResult:
    started, note, error = time.perf_counter(), "", ""
    try:
        note = check.run()
    except Exception as caught:
        error = "".join(traceback.format_exception(caught))
    return CheckResult(note, error, time.perf_counter() - started)


def _line(check: Check, told: Sequence[CheckResult]) -> str:
    """A check's line in the report; below it, the errors of all ranks, each text once."""
    seconds = max(result.seconds for result in told)
    errors: dict[str, list[int]] = {}
    for rank, result in enumerate(told):
        if result.error:
            errors.setdefault(result.error, []).append(rank)
    lines = [f"{'FAILED' if errors else 'ok':6}  {check.name:36} {seconds:6.1f} s  {told[0].note}"]
    for text, ranks in errors.items():
        lines += [f"        ranks {ranks}:", *(f"        {line}" for line in text.rstrip().splitlines())]
    return "\n".join(lines)


def _header(machines: Sequence[tuple[str, str]], device: torch.device, before: dict[str, str]) -> Iterator[str]:
    yield f"pipeflow {pipeflow.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield f"CUDA {torch.version.cuda}, NCCL {nccl}"
    for host, ranks in groupby(range(len(machines)), key=lambda rank: machines[rank]):
        numbers = list(ranks)
        yield f"{len(numbers)} ranks on {host[0]} ({platform.system()} {platform.release()}): {host[1]}"
    yield f"set before: {' '.join(f'{name}={value}' for name, value in before.items()) or 'nothing of CUDA or NCCL'}"
    yield ""


def _environment() -> dict[str, str]:
    """The variables of CUDA and NCCL that were set when this process began."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in DEFAULTS or name.startswith(("NCCL_", "CUDA_", "TORCH_NCCL_", "PYTORCH_CUDA_"))
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


if __name__ == "__main__":
    sys.exit(main())
