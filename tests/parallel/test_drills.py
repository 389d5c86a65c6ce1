"""Jobs of which a rank is stopped (SIGSTOP), killed at any moment from launch to exit, or cut off with its machine:
each other rank names it in time, no process stays, and where nobody died the next step works.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeflow.engine.parallel.control.rescue import LONGEST
from pipeflow.testing.ranks import PRELOADED, free_port
from tests.parallel.drill_rank import RANKS, TIMEOUT, drill, drill_set_up
from tests.parallel.set_ups import SET_UPS
from tests.parallel.two_hosts import ADDRESSES, NAMES, available, hosts

pytestmark = pytest.mark.drill
ROOT = Path(__file__).parents[2]
TO_RAISE, TO_END = 10.0, 30.0  # seconds
MANY = 1_000_000  # steps
GRACE = 2 * LONGEST  # after which torch's groups are closed, and then the process ends
Told = dict[int, Any]


class Job:
    """The processes of a try and what they wrote down."""

    def __init__(self, folder: Path, processes: list[Any]) -> None:
        self.folder = folder
        self.processes = processes

    def read(self, name: str) -> Told:
        files = {rank: self.folder / f"{name}-{rank}" for rank in range(RANKS)}
        return {rank: json.loads(file.read_text(encoding="utf-8")) for rank, file in files.items() if file.exists()}

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not ready() and time.monotonic() < end:
            time.sleep(0.02)
        return ready()

    def alive(self) -> list[int]:
        return [rank for rank, each in enumerate(self.processes) if is_alive(each)]

    def require_end(self) -> None:
        assert self.wait(lambda: not self.alive(), TO_END), f"ranks {self.alive()} stay"


def is_alive(process: Any) -> bool:
    return (process.poll() if isinstance(process, subprocess.Popen) else process.exitcode) is None


@contextmanager
def job(start: Callable[[str, int, int], Any]) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [start(folder, rank, port) for rank in range(RANKS)]
        try:
            yield Job(Path(folder), processes)
        finally:
            for process in processes:
                process.kill()
                (process.wait if isinstance(process, subprocess.Popen) else process.join)()


def forked(what: object, run: Callable[..., None] = drill) -> Callable[[str, int, int], Any]:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def start(folder: str, rank: int, port: int) -> Any:
        process = context.Process(target=run, args=(folder, rank, port, what), daemon=True)
        process.start()
        return process

    return start


def require_named(told: Told, culprits: set[int], moment: float, soon: dict[str, float]) -> None:
    """By each who was told of something, in time, where a phase may have a time of its own."""
    for rank, each in told.items():
        if rank not in culprits:
            assert {each["rank"], each["died"]} & culprits, each["message"]
            assert each["died"] in {None, *culprits}, each["message"]
            assert each["at"] - moment < soon.get(each["phase"], TO_RAISE), each["message"]


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_is_stopped_and_later_goes_on(victim: int, turn: int) -> None:
    with job(forked(MANY)) as ranks:
        assert ranks.wait(lambda: len(ranks.read("stepping")) == RANKS, TO_END)
        time.sleep(random.Random(f"{victim} {turn}").uniform(0.0, 0.5))
        moment = time.monotonic()
        os.kill(ranks.processes[victim].pid, signal.SIGSTOP)
        assert ranks.wait(lambda: len(ranks.read("told").keys() - {victim}) == RANKS - 1, 2 * TO_RAISE)
        told = ranks.read("told")
        require_named(told, {victim}, moment, {})
        assert {each["died"] for each in told.values()} == {None}
        os.kill(ranks.processes[victim].pid, signal.SIGCONT)
        assert ranks.wait(lambda: len(ranks.read("told")) == RANKS, TO_RAISE)
        (ranks.folder / "go").touch()
        assert ranks.wait(lambda: len(ranks.read("works")) == RANKS, 4 * TIMEOUT)
        assert all(ranks.read("works").values()), ranks.read("works")
        ranks.require_end()


@pytest.mark.parametrize("phase", ["launch", "steps"])
@pytest.mark.parametrize("number", range(5))
def test_a_rank_is_killed(phase: str, number: int, turn: int) -> None:
    """At any moment, while the job launches or from its first step to its exit."""
    choices = random.Random(f"{phase} {number} {turn}")
    victim = choices.randrange(RANKS)
    with job(forked(40)) as ranks:
        if phase == "steps":
            assert ranks.wait(lambda: len(ranks.read("stepping")) == RANKS, TO_END)
        time.sleep(choices.uniform(0.0, 2.5))
        moment = time.monotonic()
        ranks.processes[victim].kill()
        ranks.require_end()
        require_named(ranks.read("told"), {victim}, moment, {"step": 1.0})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", SET_UPS)
def test_a_rank_is_lost_in_each_set_up(name: str, number: signal.Signals, turn: int) -> None:
    """The others raise an error, or end with one, that names it."""
    choices = random.Random(f"{name} {number} {turn}")
    victim = choices.randrange(RANKS)
    with job(forked(name, drill_set_up)) as ranks:
        assert ranks.wait(lambda: len(ranks.read("stepping")) == RANKS, 4 * TO_END)
        time.sleep(choices.uniform(0.0, 0.5))
        moment = time.monotonic()
        os.kill(ranks.processes[victim].pid, number)
        ranks.wait(lambda: set(ranks.alive()) <= {victim}, TO_END)
        took = time.monotonic() - moment
        told, stay = ranks.read("told"), set(ranks.alive()) - {victim}
        for rank in stay:
            os.kill(ranks.processes[rank].pid, signal.SIGABRT)
        assert ranks.wait(lambda: set(ranks.alive()) <= {victim}, TO_END)
        for rank in set(range(RANKS)) - {victim}:
            said = (ranks.folder / f"said-{rank}").read_text(encoding="utf-8")
            last = told[rank]["message"] if rank in told else said
            assert rank not in stay, f"rank {rank} still waits after {took:.0f} s: {said}"
            assert f"rank {victim}" in last, f"rank {rank}: {last[-600:]}"
        assert took < TIMEOUT + GRACE + 5


@pytest.mark.skipif(not available(), reason="needs root and network namespaces")
def test_a_machine_is_cut_off(tmp_path: Path, turn: int) -> None:
    """Of two, of two ranks each; each side names a rank of the other."""
    with hosts(tmp_path) as on:

        def start(folder: str, rank: int, port: int) -> Any:
            command = [*on[rank // 2], sys.executable, "-m", "tests.parallel.drill_rank"]
            command += [folder, str(rank), str(port), str(MANY), ADDRESSES[0]]
            own = {name: each for name, each in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}  # of a launch here
            return subprocess.Popen(command, cwd=ROOT, env=own)

        with job(start) as ranks:
            assert ranks.wait(lambda: len(ranks.read("stepping")) == RANKS, 4 * TO_END)
            time.sleep(random.Random(turn).uniform(0.0, 0.5))
            moment = time.monotonic()
            subprocess.run(f"ip -n {NAMES[1]}-{os.getpid()} link set pf{os.getpid()}b down".split(), check=True)
            assert ranks.wait(lambda: len(ranks.read("told")) == RANKS, 2 * TO_RAISE)
            for rank, each in ranks.read("told").items():
                assert each["rank"] // 2 != rank // 2, each["message"]
                assert each["at"] - moment < TO_RAISE, each["message"]
