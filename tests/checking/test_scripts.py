"""Processes of a script that is checked: when its recording ends, how they end, and whose error is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeflow.checking import check, record, scripts
from pipeflow.checking.files import file_of, is_whole
from pipeflow.checking.findings import paragraph
from pipeflow.checking.runs import load
from pipeflow.checking.scripts import RAISED, run_both
from pipeflow.core.errors import UsageError

Write = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Write:
    path = tmp_path / "train.py"

    def write(text: str) -> Path:
        path.write_text(text, encoding="utf-8")
        return path

    return write


OWN_SHARDS = """
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
inputs, labels = torch.randn(8, 4), torch.randn(8, 1)
own = [each for index, each in enumerate(model.parameters()) if index % ranks == rank]
optimizer = torch.optim.SGD(own, lr=0.1)
while True:  # `check` ends it
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), labels).backward()
    optimizer.step()
    for index, each in enumerate(model.parameters()):  # each rank has stepped its share
        dist.broadcast(each.data, index % ranks)
"""


@pytest.mark.slow
def test_a_step_ends_as_the_next_one_begins(script: Write, tmp_path: Path) -> None:
    result = check(*run_both(script(OWN_SHARDS), [], tmp_path, ranks=2))
    assert result.alike, paragraph(result)
    assert result.compared["updates"] == 8


LAZY = """
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4), nn.Linear(4, 1))
inputs, labels = torch.randn(8, 4), torch.randn(8, 1)
model(inputs)  # gives the layers their shapes
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs[rank::ranks]), labels[rank::ranks]).backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
        each.grad /= ranks
    optimizer.step()
"""


@pytest.mark.slow
def test_a_call_that_gives_lazy_modules_their_shapes_is_no_step(script: Write, tmp_path: Path) -> None:
    result = check(*run_both(script(LAZY), [], tmp_path, ranks=2))
    assert result.alike, paragraph(result)
    assert result.compared["updates"] == 12


@pytest.mark.slow
def test_a_script_that_ends_itself_leaves_no_process_group(script: Write, tmp_path: Path) -> None:
    ends = f"""
import atexit
atexit.register(lambda: open({str(tmp_path)!r} + f"/{{rank}}-of-{{ranks}}", "w").write(str(dist.is_initialized())))
"""
    run_both(script(ends + OWN_SHARDS.replace("while True", "for _ in range(2)")), [], tmp_path, ranks=1)
    assert (tmp_path / "0-of-1").read_text(encoding="utf-8") == "False"


HANGS = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
print("waits for a friend", file=sys.stderr)
child.wait()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_script_that_hangs_is_ended_with_what_it_started(
    script: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tmp_path / "ids"

    def tail(path: Path) -> list[str]:
        while not ids.exists():
            time.sleep(0.05)
        return read(path) or tail(path)

    read = scripts._tail
    monkeypatch.setattr(scripts, "_tail", tail)  # the script may come to nothing before the deadline
    with pytest.raises(UsageError, match=r"did not end its steps in one process .* rank 0: waits for a friend"):
        run_both(script(HANGS), [str(ids)], tmp_path, ranks=1, deadline=0.1)
    assert not any(alive(int(pid)) for pid in ids.read_text(encoding="utf-8").split())


@pytest.mark.slow
def test_a_script_ends_with_the_check_that_is_killed(script: Write, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    run = "import sys; from pathlib import Path; from pipeflow.checking.scripts import run_both; "
    run += f"run_both(Path(sys.argv[1]), [sys.argv[2]], Path({str(tmp_path)!r}), ranks=1)"
    starter = subprocess.Popen([sys.executable, "-c", run, str(script(HANGS)), str(ids)])
    while not ids.exists():
        assert starter.poll() is None
        time.sleep(0.05)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    while any(alive(int(pid)) for pid in ids.read_text(encoding="utf-8").split()):  # within the test's deadline
        time.sleep(0.05)


FAILS = """
import os, sys
import torch
import torch.distributed as dist
if os.environ["WORLD_SIZE"] == "1":
    sys.exit()
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("mine")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_the_error_of_the_rank_that_failed_first(
    script: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").mkdir()  # as if it had trained

    def dead_together(dead: dict[int, float], said: list[Path]) -> str:
        while not any(line.startswith(RAISED) for line in scripts._tail(said[0])):  # it has lost its partner
            time.sleep(0.05)
        return of_culprit({0: 0.0, **dead}, said)

    of_culprit = scripts._of_culprit
    monkeypatch.setattr(scripts, "_of_culprit", dead_together)
    with pytest.raises(UsageError, match="the script failed on several ranks: rank 1: ValueError: mine"):
        run_both(script(FAILS), [], tmp_path, ranks=2)


def test_one_that_died_without_an_error_came_first(tmp_path: Path) -> None:
    said = [tmp_path / "0", tmp_path / "1"]
    said[0].write_text(f"{RAISED}3.5\nRuntimeError: Connection closed by peer\n", encoding="utf-8")
    said[1].write_text("a warning\n", encoding="utf-8")
    assert scripts._of_culprit({0: 5.0, 1: 0.0}, said) == "rank 1: a warning"
    assert "Connection" in scripts._of_culprit({0: 0.0, 1: 4.0}, said)  # it aborted, later


def test_what_a_rank_says_is_cut(tmp_path: Path) -> None:
    said = tmp_path / "0"
    said.write_text("RuntimeError: " + "x" * 10**6 + "\n" * 9, encoding="utf-8")
    assert len(scripts._message(said)) == 400


ONE_TRAINS = """
import os, time
import torch
from torch import nn
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(1, 2)).sum().backward()
    if os.environ["RANK"] == "0":
        optimizer.step()
"""


@pytest.mark.slow
def test_a_rank_that_takes_no_step_is_not_waited_for(
    script: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "_GRACE", 0.0)
    with pytest.raises(UsageError, match=r"did not end its steps on several ranks within .*: rank 1: it wrote no"):
        run_both(script(ONE_TRAINS), [], tmp_path, ranks=2)


def test_the_port_of_a_run_is_its_own() -> None:
    with scripts._held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        socket.create_server(("127.0.0.1", port)).close()  # as rank 0 does


def test_processes_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "never"))
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match="a process of the script cannot be started: No such file"):
        run_both(tmp_path / "train.py", [], tmp_path, ranks=2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_recording_that_ends_within_a_function_of_torch(tmp_path: Path) -> None:
    """Such as a backward that calls the model, as engines do. What comes later is not recorded."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(tmp_path, model) as recording:
        for step in range(3):
            found = model(torch.ones(1, 2))
            if step == 1:
                found.register_hook(lambda _: recording.end())
            found.sum().backward()
            optimizer.step()
        assert is_whole(file_of(tmp_path, 0))
    assert load(tmp_path).num_steps == 2
    assert is_whole(file_of(tmp_path, 0))
