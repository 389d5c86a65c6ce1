"""Both runs of a script that uses pipeflow: plainly in one process, and on several ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeflow.core.errors import UsageError

VARIABLE = "PIPEFLOW_CHECK"  # tells the processes what to do


@dataclass(frozen=True)
class Changes:
    """What is changed in a script while it is recorded.

    Attributes:
        folder: of the recording.
        steps: of the optimizer; the script ends after them.
        plain: one stage on one rank, without tensor ranks.
        tensor: number of tensor ranks; None: as the script says.
        schedule: name of the schedule; None: as the script says.
    """

    folder: str
    steps: int
    plain: bool
    tensor: int | None = None
    schedule: str | None = None


def run_both(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    *,
    ranks: int,
    tensor: int | None = None,
    schedule: str | None = None,
    steps: int = 2,
) -> tuple[Path, Path]:
    """Runs a script in one process and on `ranks`, and returns the folders of both recordings.

    Raises UsageError if the script is missing, if it fails, or if it runs no step of a Pipeline.
    """
    if not script.is_file():
        raise UsageError(f"{script} is no script: name a file of Python, or two folders of recordings")
    plain, parallel = folder / "plain", folder / "parallel"
    command = [sys.executable, "-m", "pipeflow.checking.scripted", str(script), *arguments]
    _run(command, Changes(str(plain), steps, True))
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    _run([sys.executable, *many, *command[1:]], Changes(str(parallel), steps, False, tensor, schedule))
    return plain, parallel


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _run(command: Sequence[str], changes: Changes) -> None:
    environment = {**os.environ, VARIABLE: json.dumps(asdict(changes))}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if changes.plain:  # as torchrun starts one process, so that the script starts no others
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    what = "in one process" if changes.plain else "on several ranks"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        told = next((line for line in reversed(lines) if "Error" in line and "ChildFailedError" not in line), lines[-1])
        raise UsageError(f"the script failed {what}: {told.strip()}")
    if not Path(changes.folder).is_dir():
        raise UsageError(
            f"the script ran no step of a pipeflow.Pipeline {what}: record its runs with pipeflow.checking.record"
        )
