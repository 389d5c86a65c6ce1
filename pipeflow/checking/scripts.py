"""Both runs of a script: plainly in one process, and on several ranks. Each rank is a process, which is ended once the
recordings of all are written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeflow.checking.files import file_of, files_of, is_recording, is_whole
from pipeflow.core.errors import UsageError

VARIABLE = "PIPEFLOW_CHECK"  # tells the processes what to do
RAISED = f"{VARIABLE} raised at "  # begins the line of standard error before an error, with the time of time.monotonic
DEADLINE = 600.0  # seconds of a run
MOST_RANKS = 256
_GRACE = 30.0  # seconds in which all ranks end a step that one has ended, beyond the time until then
_POLL = 0.05  # seconds
_TAIL, _LINE = 2**16, 400  # bytes of a rank's output that are read, letters of a line of it that are told


@dataclass(frozen=True)
class Changes:
    """What is changed in a script while it is recorded.

    Attributes:
        folder: of the recording.
        steps: of the optimizer; what comes after them is not recorded.
        plain: one stage on one rank, without tensor ranks.
        tensor: number of tensor ranks; None: as the script says.
        schedule: name of the schedule; None: as the script says.
        whole: as in `record`.
        lives: file descriptor of a pipe that is closed when the process must end; None: it ends by itself.
    """

    folder: str
    steps: int
    plain: bool
    tensor: int | None = None
    schedule: str | None = None
    whole: str = ""
    lives: int | None = None


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
    deadline: float = DEADLINE,
) -> tuple[Path, Path]:
    """Runs a script in one process and on `ranks`, and returns the folders of both recordings. The plain run has
    `plain_arguments`, which may begin with another script, or the arguments of the other run. `deadline` is in seconds,
    of each run.

    Raises UsageError if a script is missing, if it fails or hangs, or if it trains no module.
    """
    plain, parallel = folder / "plain", folder / "parallel"
    alone = [str(script), *(arguments if plain_arguments is None else plain_arguments)]
    if plain_arguments and plain_arguments[0].endswith(".py"):
        alone = list(plain_arguments)
    for each in (str(script), alone[0]):
        if not Path(each).is_file():
            raise UsageError(f"{each} is no script: name a file of Python, or two folders of recordings")
    if ranks > MOST_RANKS:
        raise UsageError(f"{ranks} ranks are too many for one machine: at most {MOST_RANKS}")
    _run(alone, 1, Changes(str(plain), steps, True, whole=whole), deadline)
    _run([str(script), *arguments], ranks, Changes(str(parallel), steps, False, tensor, schedule, whole), deadline)
    return plain, parallel


def _run(words: Sequence[str], ranks: int, changes: Changes, deadline: float) -> None:
    """Runs a script until all ranks have recorded its steps, or until it ends by itself."""
    folder = Path(changes.folder)
    for _, old in files_of(folder) if folder.is_dir() else ():
        if is_recording(old):
            old.unlink()
    what = "in one process" if changes.plain else "on several ranks"
    said = [folder.with_name(f"{folder.name}-{rank}.txt") for rank in range(ranks)]
    with _started(words, changes, said) as processes:
        _wait(processes, folder, said, what, deadline)
    if not folder.is_dir():
        raise UsageError(f"the script trained no module {what}: record its runs with pipeflow.checking.record")


@contextmanager
def _started(words: Sequence[str], changes: Changes, said: Sequence[Path]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Context manager that starts a process for each rank, as torchrun does, whose standard error goes to its file of
    `said`. At its end, it ends them and the processes that they started. If this process is killed, they end as well.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        port = stack.enter_context(_held_port())
        reader, writer = os.pipe()
        stack.callback(os.close, reader)
        stack.callback(os.close, writer)
        stack.callback(_end, processes)
        environment = {**os.environ, VARIABLE: json.dumps(asdict(replace(changes, lives=reader)))}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment |= {"WORLD_SIZE": str(len(said)), "LOCAL_WORLD_SIZE": str(len(said)), "GROUP_RANK": "0"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "check"}
        for rank, path in enumerate(said):
            path.parent.mkdir(parents=True, exist_ok=True)
            mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(_process(words, mine, path, reader))
        yield processes


def _process(words: Sequence[str], environment: dict[str, str], said: Path, pipe: int) -> subprocess.Popen[bytes]:
    try:
        with said.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "pipeflow.checking.scripted", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                pass_fds=[pipe],
                start_new_session=True,
            )
    except OSError as error:
        raise UsageError(f"a process of the script cannot be started: {error.strerror}") from None


@contextmanager
def _held_port() -> Iterator[int]:
    """Context manager that yields a port on which rank 0 can listen, and which no other program is given meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # others that set it may bind the same port
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for each in processes:
        with suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)  # its session, with what it started
    for each in processes:
        each.wait()


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], folder: Path, said: Sequence[Path], what: str, deadline: float
) -> None:
    """Returns when the recordings of all ranks are whole, or the script has ended on all.

    Raises UsageError if it failed on a rank, or if it does neither within `deadline` seconds.
    """
    began, until, dead = time.monotonic(), time.monotonic() + deadline, dict[int, float]()
    while True:
        for rank, process in enumerate(processes):
            if process.poll():
                dead.setdefault(rank, 0.0 if process.returncode != -signal.SIGABRT else time.monotonic())
        whole = [rank for rank in range(len(processes)) if is_whole(file_of(folder, rank))]
        if len(whole) == len(processes):
            return
        if dead:
            raise UsageError(f"the script failed {what}: {_of_culprit(dead, said)}")
        if all(process.returncode == 0 for process in processes):
            return
        now = time.monotonic()
        if whole:
            until = min(until, now + _GRACE + now - began)
        if now > until:
            lines = "; ".join(
                f"rank {rank}: {_message(path)}" for rank, path in enumerate(said[:8]) if rank not in whole
            )
            raise UsageError(
                f"the script did not end its steps {what} within {now - began:.0f} s (--deadline allows more, and "
                f"--steps asks for fewer), and said last: {lines}"
            )
        time.sleep(_POLL)


def _of_culprit(dead: dict[int, float], said: Sequence[Path]) -> str:
    """The message of the rank that failed first: others fail since it is gone. One that died without an error came
    before those that raised one, unless it aborted itself.
    """
    times = dict(dead)
    for rank, path in enumerate(said):
        for line in _tail(path):
            if line.startswith(RAISED):
                times[rank] = float(line.removeprefix(RAISED))
    first = min(times, key=lambda rank: times[rank])
    return f"{f'rank {first}: ' if len(said) > 1 else ''}{_message(said[first])}"


def _tail(path: Path) -> list[str]:
    """The last lines that a rank wrote to standard error, without empty ones, and without the rank that torch adds."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        text = file.read(_TAIL).decode(errors="replace")
    lines = (re.sub(r"^\[rank\d+\]:", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


def _message(path: Path) -> str:
    """The line of a rank's standard error that says what went wrong, or the last one."""
    lines = [line for line in _tail(path) if not line.startswith(RAISED)] or ["it wrote no message"]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])[:_LINE]
