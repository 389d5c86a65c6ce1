"""Both runs of a script: plainly in one process, and on several ranks."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeflow.core.errors import UsageError

_OF_TORCHRUN = re.compile(r"[DIWEC]\d{4} .*torch/distributed/")  # a line of its log
_END = re.compile(r"E\d{4} .*failed \(exitcode")
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
        whole: as in `record`.
    """

    folder: str
    steps: int
    plain: bool
    tensor: int | None = None
    schedule: str | None = None
    whole: str = ""


def run_both(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    *,
    ranks: int,
    tensor: int | None = None,
    schedule: str | None = None,
    plain_arguments: Sequence[str] | None = None,
    steps: int = 2,
    whole: str = "",
) -> tuple[Path, Path]:
    """Runs a script in one process and on `ranks`, and returns the folders of both recordings. The plain run has
    `plain_arguments`, which may begin with another script, or the arguments of the other run.

    Raises UsageError if a script is missing, if it fails, or if it trains no module.
    """
    plain, parallel = folder / "plain", folder / "parallel"
    alone = [str(script), *(arguments if plain_arguments is None else plain_arguments)]
    if plain_arguments and plain_arguments[0].endswith(".py"):
        alone = list(plain_arguments)
    for each in (str(script), alone[0]):
        if not Path(each).is_file():
            raise UsageError(f"{each} is no script: name a file of Python, or two folders of recordings")
    run = [sys.executable, "-m", "pipeflow.checking.scripted"]
    _run([*run, *alone], Changes(str(plain), steps, True, whole=whole))
    many = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    changes = Changes(str(parallel), steps, False, tensor, schedule, whole)
    _run([*many, *run[1:], str(script), *arguments], changes)
    return plain, parallel


def _message(text: str) -> str:
    """The line of a script's error output that says what went wrong, before what torchrun adds."""
    found = [line.strip() for line in text.splitlines() if line.strip()]
    end = next((index for index, line in enumerate(found) if _END.match(line)), len(found))
    own = [line for line in found[:end] if not _OF_TORCHRUN.match(line)]
    own = own or ["it ended with an error, and without a message"]
    return next((line for line in reversed(own) if "Error" in line), own[-1])


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
        raise UsageError(f"the script failed {what}: {_message(done.stderr)}")
    if not Path(changes.folder).is_dir():
        raise UsageError(f"the script trained no module {what}: record its runs with pipeflow.checking.record")
