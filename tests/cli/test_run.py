"""`pipeflow run`: a rank that ends leaves the others as they are, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.cli.run import error

ROOT = Path(__file__).parents[2]
BEGIN = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = Path(sys.argv[1])
(folder / f"{rank}.pid").write_text(str(os.getpid()))

def wait(done):
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)
"""
QUICK = "import sys; from pipeflow.tools.cli import run, main; run.GRACE = 0.5; sys.exit(main())"
"""Runs the command with a short time to end."""


@contextmanager
def started(folder: Path, script: str, *options: str, ranks: int = 2) -> Iterator[subprocess.Popen[str]]:
    """Context manager that starts a script, which has the names of `BEGIN`. Nothing of it may be left at the end."""
    (folder / "script.py").write_text(BEGIN + script, encoding="utf-8")
    command = [sys.executable, "-c", QUICK, "run", "--ranks", str(ranks), *options, "script.py", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
        end = time.monotonic() + 10
        while left := [each for each in folder.glob("*.pid") if _runs(int(each.read_text(encoding="utf-8") or 0))]:
            assert time.monotonic() < end, f"{left} still run"
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
        for each in folder.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(each.read_text(encoding="utf-8")), signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def result(folder: Path, script: str, *options: str, ranks: int = 2) -> tuple[int, list[str], list[str]]:
    """The status of a script, and the lines of its output and of its standard error, sorted by rank."""
    with started(folder, script, *options, ranks=ranks) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, sorted(out.splitlines()), sorted(err.splitlines())


def wait(done: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_rank_that_dies_leaves_the_others_and_its_status(tmp_path: Path) -> None:
    script = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
wait((folder / "1.pid").exists)
time.sleep(1)
print(os.environ["TORCHELASTIC_RUN_ID"], "goes on")
sys.exit(3 * (rank == 2))
"""
    status, out, err = result(tmp_path, script, ranks=3)
    assert (status, out) == (128 + signal.SIGKILL, [f"[rank {rank}] pipeflow run goes on" for rank in (0, 2)])
    assert err == [
        "pipeflow run: rank 0 ended with status 0",
        "pipeflow run: rank 1 was killed by SIGKILL",
        "pipeflow run: rank 2 ended with status 3",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("restarts", "status"), [(2, 0), (1, 7)])
def test_a_rank_that_fails_is_started_again(restarts: int, status: int, tmp_path: Path) -> None:
    script = """
print("life", count, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
sys.exit(7 * (rank == 1 and count < 2))
"""
    found, out, err = result(tmp_path, script, "--restart", str(restarts))
    assert found == status
    assert out == [f"[rank 0] life 0 of {restarts}", *(f"[rank 1] life {n} of {restarts}" for n in range(restarts + 1))]
    again = [f"rank 1 ended with status 7; it is started again, {n + 1} of {restarts} times" for n in range(restarts)]
    last = f"rank 1 ended with status {status}"
    assert err == sorted(f"pipeflow run: {each}" for each in ["rank 0 ended with status 0", last, *again])


TRAINS = """
import pipeflow, torch
context = pipeflow.launch(timeout=20)
schedule = pipeflow.make_schedule("1f1b", ranks=2, microbatches=2)
model = pipeflow.Pipeline(torch.nn.Linear(2, 2), schedule, criterion=torch.nn.MSELoss())
batch = torch.ones(2, 2), torch.ones(2, 2)
pipeflow.execute_pipeline(iter([batch]), model)
if rank == 0 and count == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    pipeflow.execute_pipeline(iter([batch]), model)
except pipeflow.PipelineError as error:
    assert error.died == 0 and rank == 1 and count == 0
    sys.exit(5)
print("trained, life", count)
"""


@pytest.mark.slow
def test_a_job_whose_rank_0_died_starts_again(tmp_path: Path) -> None:
    """The store lives on, although rank 0 has died."""
    status, out, err = result(tmp_path, TRAINS, "--restart", "1")
    assert (status, out) == (0, ["[rank 0] trained, life 1", "[rank 1] trained, life 1"]), err


@pytest.mark.slow
def test_the_nodes_of_a_job_meet(tmp_path: Path) -> None:
    (folders := [tmp_path / "0", tmp_path / "1"])[0].mkdir()
    folders[1].mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    script = (
        "import pipeflow\ncontext = pipeflow.launch(timeout=30)\nprint(context.rank, 'of', context.layout.world_size)"
    )
    options = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
    with (
        started(folders[0], script, *options, "0", ranks=1) as first,
        started(folders[1], script, *options, "1", ranks=1) as second,
    ):
        assert second.communicate(timeout=120)[0] == "[rank 1] 1 of 2\n"
        assert first.communicate(timeout=120)[0] == "[rank 0] 0 of 2\n"


@pytest.mark.slow
@pytest.mark.parametrize(("caught", "status"), [("sys.exit(4)", 4), ("None", 128 + signal.SIGKILL)])
def test_ranks_get_signals_and_time_to_end(caught: str, status: int, tmp_path: Path) -> None:
    """They are not started again. Those that do not end are killed."""
    script = f"""
signal.signal(signal.SIGUSR1, lambda *_: (folder / f"{{rank}}.told").touch())
signal.signal(signal.SIGTERM, lambda *_: {caught})
(folder / f"{{rank}}.ready").touch()
wait(lambda: False)
"""
    with started(tmp_path, script, "--restart", "3") as process:
        wait(lambda: len([*tmp_path.glob("*.ready")]) == 2)
        process.send_signal(signal.SIGUSR1)
        wait(lambda: len([*tmp_path.glob("*.told")]) == 2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (status, "")
    assert "again" not in err


@pytest.mark.slow
def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    script = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
(folder / f"child{rank}.pid").write_text(str(child.pid))
"""
    assert result(tmp_path, script)[0] == 0
    assert len([*tmp_path.glob("child*.pid")]) == 2


@pytest.mark.slow
def test_ranks_end_if_the_command_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, "(folder / f'{rank}.ready').touch()\nwait(lambda: False)") as process:
        wait(lambda: len([*tmp_path.glob("*.ready")]) == 2)
        process.kill()


@pytest.mark.slow
def test_lines_of_ranks_stay_whole(tmp_path: Path) -> None:
    script = """
for number in range(300):
    print(number, str(rank) * 5000)
sys.stderr.write("no end")
"""
    status, out, err = result(tmp_path, script)
    assert status == 0
    assert sorted(out) == sorted(f"[rank {rank}] {n} {str(rank) * 5000}" for rank in range(2) for n in range(300))
    assert err[:2] == ["[rank 0] no end", "[rank 1] no end"]


@pytest.mark.slow
def test_a_reader_that_leaves_stops_no_rank(tmp_path: Path) -> None:
    script = """
print("first")
wait((folder / "left").exists)
for _ in range(2000):
    print("x" * 1000)
(folder / f"{rank}.done").touch()
"""
    with started(tmp_path, script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        (tmp_path / "left").touch()
        assert process.wait(60) in (0, 120)  # 120: Python could not flush its output
        assert len([*tmp_path.glob("*.done")]) == 2
        process.stdout = None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ranks", 0, "a.py"], "ranks must be an integer of at least 1, got 0"),
        (["--ranks", 1, "--restart", -1, "a.py"], "restart must be an integer of at least 0, got -1"),
        (["--ranks", 1, "--node-rank", 1, "a.py"], "--node-rank must be from 0 to 0, got 1"),
        (["--ranks", 1, "--nodes", 2, "a.py"], "several nodes need --master-addr"),
        (["--ranks", 1, "a.py"], "there is no script 'a.py' here"),
        (["--ranks", 1, "--master-addr", "no.such.host.invalid", "-m", "a"], "no store can be served at no.such"),
        (["--ranks", 1], "the following arguments are required: SCRIPT"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], argv: list[object], said: str) -> None:
    assert said in error(capsys, "run", *argv)
