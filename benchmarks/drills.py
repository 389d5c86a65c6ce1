"""What a job must survive, or end in words: ranks that are stopped (SIGSTOP), a machine that is cut off (in network
namespaces, as root), `kill -9` at random moments from launch to exit, and restarts by torchrun. Minutes each.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.drill_rank import RANKS, TIMEOUT, drill
from benchmarks.report import Report
from pipeflow.testing.ranks import PRELOADED, free_port

TO_RAISE, TO_END = 10.0, 30.0  # seconds
MANY = 1_000_000  # steps


def run(rounds: int | None = None) -> Report:
    tries = rounds or 20
    columns = [
        "",
        "tries",
        "named right",
        "told in time",
        "slowest",
        "only waited, called dead",
        "next step works",
        "left behind",
    ]
    title = f"drills: {RANKS} ranks over gloo, timeout {TIMEOUT:g} s"
    report = Report("drills", title, columns)
    choices = random.Random(0)
    for name, one, times in (
        ("stopped", stop_once, tries),
        ("kill -9", kill_once, 5 * tries),
        ("cut off", cut_once, tries),
    ):
        if name == "cut off" and not can_cut():
            report.notes.append("cut off: needs root and `ip netns`")
            continue
        found = [one(choices, number) for number in range(times)]
        report.rows.append([name, str(times), *summary(found)])
        report.data[name] = found
    identical = sum(restart_once(mode, 1 + number) for mode in MODES for number in range(max(1, tries // 4)))
    report.notes.append(
        f"torchrun --max-restarts 3, a rank killed: {identical} of {2 * max(1, tries // 4)} jobs finish bit-identical"
    )
    return report


def summary(found: list[dict[str, Any]]) -> list[str]:
    slowest = [each["slowest"] for each in found if each["slowest"] is not None]
    counts = [sum(bool(each[key]) for each in found) for key in ("named", "in time")]
    called, works, left = (sum(each[key] for each in found) for key in ("called dead", "works", "left"))
    return [*map(str, counts), f"{max(slowest, default=0.0):.2f} s", str(called), str(works), str(left)]


class Job:
    """The processes of a try and what they wrote down."""

    def __init__(self, start: Callable[[str, int, int], Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        port = free_port()
        self.processes = [start(self._folder.name, rank, port) for rank in range(RANKS)]

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def read(self, name: str) -> dict[int, Any]:
        files = {rank: self.folder / f"{name}-{rank}" for rank in range(RANKS)}
        return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not ready() and time.monotonic() < end:
            time.sleep(0.02)
        return ready()

    def alive(self) -> int:
        ended = [p.exitcode if hasattr(p, "exitcode") else p.poll() for p in self.processes]
        return sum(code is None for code in ended)

    def end(self) -> int:
        """How many had to be ended."""
        self.wait(lambda: self.alive() == 0, TO_END)
        left = self.alive()
        for process in self.processes:
            process.kill()
        self._folder.cleanup()
        return left


def forked(steps: int) -> Callable[[str, int, int], Any]:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def start(folder: str, rank: int, port: int) -> Any:
        process = context.Process(target=drill, args=(folder, rank, port, steps), daemon=True)
        process.start()
        return process

    return start


def judge(job: Job, moment: float, culprits: set[int], *, expected: int, soon: dict[str, float]) -> dict[str, Any]:
    told = job.read("told")
    late = {rank: each["at"] - moment for rank, each in told.items()}
    lived = [each for rank, each in told.items() if rank not in culprits]
    return {
        "named": len(lived) >= expected and all({each["rank"], each["died"]} & culprits for each in lived),
        "in time": all(
            late[rank] < soon.get(each["phase"], TO_RAISE) for rank, each in told.items() if rank not in culprits
        ),
        "slowest": max((late[rank] for rank in told if rank not in culprits), default=None),
        "called dead": sum(each["died"] is not None and each["died"] not in culprits for each in lived),
        "told": told,
    }


def stop_once(choices: random.Random, number: int) -> dict[str, Any]:
    """A rank is stopped in the middle of training, rank 0 every fourth time; later it goes on."""
    job, victim = Job(forked(MANY)), number % RANKS
    job.wait(lambda: len(job.read("stepping")) == RANKS, TO_END)
    time.sleep(choices.uniform(0.0, 0.5))
    moment = time.monotonic()
    os.kill(job.pids()[victim], signal.SIGSTOP)
    job.wait(lambda: len(job.read("told").keys() - {victim}) == RANKS - 1, 2 * TO_RAISE)
    found = judge(job, moment, {victim}, expected=RANKS - 1, soon={})
    found["called dead"] = sum(each["died"] is not None for each in found["told"].values())
    os.kill(job.pids()[victim], signal.SIGCONT)
    job.wait(lambda: len(job.read("told")) == RANKS, TO_RAISE)
    (job.folder / "go").touch()
    job.wait(lambda: len(job.read("works")) == RANKS, 4 * TIMEOUT)
    works = job.read("works")
    return {**found, "works": len(works) == RANKS and all(works.values()), "left": job.end(), "victim": victim}


def kill_once(choices: random.Random, number: int) -> dict[str, Any]:
    """A rank is killed at any moment: every other time while the job launches, else from its first step to its exit."""
    job, victim = Job(forked(40)), choices.randrange(RANKS)
    if number % 2:
        job.wait(lambda: len(job.read("stepping")) == RANKS, TO_END)
    time.sleep(choices.uniform(0.0, 2.5))
    moment, pid = time.monotonic(), job.pids()[victim]
    was_alive = job.processes[victim].exitcode is None
    if was_alive:
        os.kill(pid, signal.SIGKILL)
    job.wait(lambda: job.alive() == 0, TO_END)
    found = judge(job, moment, {victim}, expected=0, soon={"step": 1.0})
    left = job.end()
    return {**found, "works": False, "left": left, "victim": victim, "was alive": was_alive}


MODES = ("--master-addr=127.0.0.1 --master-port={port}", "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port}")


def restart_once(mode: str, victim: int) -> bool:
    """Whether a job of which one rank is killed ends with the weights of one that nothing happens to."""
    return trained(mode, victim % RANKS, killed=True) == trained(mode, victim % RANKS, killed=False) != {}


def trained(mode: str, victim: int, *, killed: bool) -> dict[int, str]:
    """The digests of all ranks' weights; none where the job did not finish."""
    with tempfile.TemporaryDirectory() as folder:
        if not killed:
            (Path(folder) / "killed").touch()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "3"]
        command += [
            *mode.format(port=free_port()).split(),
            "-m",
            "benchmarks.drill_rank",
            "train",
            folder,
            "40",
            str(victim),
        ]
        subprocess.run(command, capture_output=True, timeout=300, check=False)
        files = {rank: Path(folder) / f"weights-{rank}" for rank in range(RANKS)}
        return {rank: file.read_text() for rank, file in files.items()} if all(map(Path.exists, files.values())) else {}


def can_cut() -> bool:
    return os.geteuid() == 0 and subprocess.run(["ip", "netns"], capture_output=True, check=False).returncode == 0


def cut_once(choices: random.Random, number: int) -> dict[str, Any]:
    """Two machines of two ranks each, joined by a cable that is cut; each side names a rank of the other."""
    name = f"pf{os.getpid()}n{number}"
    sides = [f"{name}a", f"{name}b"]
    try:
        for command in cable(name, *sides):
            subprocess.run(command.split(), check=True)

        def start(folder: str, rank: int, port: int) -> Any:
            command = ["ip", "netns", "exec", sides[rank // 2], sys.executable, "-m", "benchmarks.drill_rank", "drill"]
            return subprocess.Popen([*command, folder, str(rank), str(port), str(MANY), "10.91.0.1"])

        job = Job(start)
        job.wait(lambda: len(job.read("stepping")) == RANKS, 4 * TO_END)
        time.sleep(choices.uniform(0.0, 0.5))
        moment = time.monotonic()
        subprocess.run(f"ip -n {sides[1]} link set {name}1 down".split(), check=True)
        job.wait(lambda: len(job.read("told")) == RANKS, 2 * TO_RAISE)
        told = job.read("told")
        named = len(told) == RANKS and all(each["rank"] // 2 != rank // 2 for rank, each in told.items())
        slowest = max((each["at"] - moment for each in told.values()), default=None)
        dead = sum(each["died"] is not None for each in told.values())
        for process in job.processes:
            process.kill()
        found = {
            "named": named,
            "in time": slowest is not None and slowest < TO_RAISE,
            "slowest": slowest,
            "told": told,
        }
        return {**found, "called dead": dead, "works": False, "left": job.end()}
    finally:
        for side in sides:
            subprocess.run(["ip", "netns", "del", side], check=False)


def cable(name: str, first: str, second: str) -> list[str]:
    return [
        f"ip netns add {first}",
        f"ip netns add {second}",
        f"ip -n {first} link set lo up",
        f"ip -n {second} link set lo up",
        f"ip link add {name}0 netns {first} type veth peer name {name}1 netns {second}",
        f"ip -n {first} addr add 10.91.0.1/24 dev {name}0",
        f"ip -n {second} addr add 10.91.0.2/24 dev {name}1",
        f"ip -n {first} link set {name}0 up",
        f"ip -n {second} link set {name}1 up",
    ]
