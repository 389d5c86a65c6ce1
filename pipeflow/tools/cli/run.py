"""`pipeflow run`: starts the ranks of a job on this machine. A rank that ends leaves the others as they are."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_at_least, require_positive
from pipeflow.tools.cli.options import Commands

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # after one of these, no rank is started again
GRACE = 30.0  # seconds that ranks have to end by themselves then
POLL = 0.05  # seconds
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl: a rank is killed when the command is
EXAMPLES = """\
examples:
  pipeflow run --ranks 8 train.py --layers 12
  pipeflow run --ranks 8 --restart 3 -m package.train
  pipeflow run --ranks 8 --nodes 2 --node-rank 1 --master-addr machine-0 train.py
"""


def add_run(commands: Commands) -> None:
    """Adds the command and its options."""
    command = commands.add_parser("run", help="start the ranks of a job on this machine", epilog=EXAMPLES)
    add = command.add_argument
    add("--ranks", type=int, required=True, metavar="N", help="number of processes on this machine")
    add(
        "--restart", type=int, default=0, metavar="N", help="times that a rank that fails is started again (default: 0)"
    )
    add("--nodes", type=int, default=1, metavar="N", help="number of machines with as many ranks (default: 1)")
    add("--node-rank", type=int, default=0, metavar="K", help="number of this machine, from 0 (default: 0)")
    add("--master-addr", metavar="HOST", help="machine 0, which serves the store (default: 127.0.0.1, for one node)")
    add("--master-port", type=int, metavar="PORT", help="its port (default: any free one, or 29500 for several nodes)")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    add("script", metavar="SCRIPT", help="what each rank runs")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="the arguments of SCRIPT")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks and waits for them. Returns 0 if all ended well at last, or else the status of the rank that was
    the first to fail: its own, or 128 and the number of the signal that killed it.
    """
    ranks, nodes, node = arguments.ranks, arguments.nodes, arguments.node_rank
    require_positive(ranks=ranks, nodes=nodes)
    require_at_least(0, restart=arguments.restart)
    if not 0 <= node < nodes:
        raise UsageError(f"--node-rank must be from 0 to {nodes - 1}, got {node}")
    if nodes > 1 and arguments.master_addr is None:
        raise UsageError("several nodes need --master-addr, the name of machine 0 that all of them know")
    if not arguments.module and not Path(arguments.script).exists():
        raise UsageError(f"there is no script {arguments.script!r} here; the name of a module comes after -m")
    host, port = arguments.master_addr or "127.0.0.1", arguments.master_port or (29500 if nodes > 1 else 0)
    from pipeflow.engine.parallel.rendezvous import RUN_ID, serve

    if node == 0:
        try:
            store: Any = serve(host, port, ranks * nodes)  # lives as long as this function
        except (OSError, RuntimeError) as error:
            raise UsageError(f"no store can be served at {host}:{port}: {error}") from None
        port = store.port
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks * nodes),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(node),
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's name for a store that no rank serves
        "TORCHELASTIC_MAX_RESTARTS": str(arguments.restart),
    }
    command = [sys.executable, "-u", *["-m"] * arguments.module, arguments.script, *arguments.arguments]
    return _Ranks(command, environment, node * ranks, ranks, arguments.restart).wait()


class _Ranks:
    """The processes of the ranks from `first` on, each of which may be started again `restarts` times."""

    def __init__(self, command: list[str], environment: dict[str, str], first: int, number: int, restarts: int) -> None:
        self.command, self.environment, self.first, self.restarts = command, environment, first, restarts
        self.processes: dict[int, subprocess.Popen[bytes]] = {}  # that run, by rank
        self.starts = dict.fromkeys(range(first, first + number), 0)
        self.until: float | None = None  # when ranks that still run are killed
        self.readers: list[Thread] = []
        self.lock = Lock()  # of what is written

    def wait(self) -> int:
        """Starts all ranks and waits until the last one has ended. Returns the status, as `run` does."""
        before = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        failed: list[int] = []
        try:
            for rank in self.starts:
                self._start(rank)
            while self.processes:
                failed += [status for rank in [*self.processes] if (status := self._ended(rank))]
                if self.until is not None and time.monotonic() > self.until:
                    _kill(self.processes.values())
                time.sleep(POLL)
        finally:
            _kill(self.processes.values())
            for number, handler in before.items():
                signal.signal(number, handler)
        for reader in self.readers:
            reader.join(1.0)
        return failed[0] if failed else 0

    def _start(self, rank: int) -> None:
        local, count = rank - self.first, self.starts[rank]
        own = {"RANK": str(rank), "LOCAL_RANK": str(local), "TORCHELASTIC_RESTART_COUNT": str(count)}
        process = subprocess.Popen(  # a session of its own, so that Ctrl-C in a terminal reaches it once, from here
            self.command,
            env={**self.environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_LIBC and partial(_LIBC.prctl, DIES_WITH_PARENT, signal.SIGKILL),
        )
        self.processes[rank], self.starts[rank] = process, count + 1
        for stream, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = Thread(target=self._copy, args=(f"[rank {rank}] ".encode(), stream, to), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _copy(self, name: bytes, stream: IO[bytes], to: Any) -> None:
        """Passes on what a rank writes, line by line, each after the rank's name."""
        for line in stream:
            with self.lock, suppress(OSError):  # a rank need not wait for a reader that has left
                to.buffer.write(name + line.rstrip(b"\n") + b"\n")
                to.flush()

    def _ended(self, rank: int) -> int | None:
        """The status of a rank that has ended for good; None if it runs. Starts it again if it may."""
        process = self.processes[rank]
        code = process.poll()
        if code is None:
            return None
        del self.processes[rank]
        _kill([process])  # what it started
        count = self.starts[rank]
        again = code != 0 and count <= self.restarts and self.until is None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        then = f"; it is started again, {count} of {self.restarts} times" if again else ""
        with self.lock:
            print(f"pipeflow run: rank {rank} {how}{then}", file=sys.stderr, flush=True)
        if again:
            self._start(rank)
            return None
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, _: object) -> None:
        for process in self.processes.values():
            process.send_signal(number)
        if number in ENDING and self.until is None:
            self.until = time.monotonic() + GRACE


def _kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kills processes and what they started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
