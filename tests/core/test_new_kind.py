"""A new kind of action is a new row: it is added to a copy of the package in three files, and everything works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pipeflow

PACKAGE = Path(pipeflow.__file__).parent
CHECKS = Path(__file__).with_name("offloading.py")

KINDS = """
    D = "D"  # what a forward saved goes to the host
    U = "U"  # and comes back
"""
CONTENTS = """
    HOST = "on the host"
"""
STREAMS = """
    COPY = "copies"
"""
ROWS = """
    Kind.D: Flow("offload", needs=((Content.SAVED, 0),), makes=((Content.HOST, 0),), stream=Stream.COPY),
    Kind.U: Flow("fetch", needs=((Content.HOST, 0),), makes=((Content.SAVED, 0),), stream=Stream.COPY),
"""
OPERATIONS = """
from concurrent.futures import Future, ThreadPoolExecutor
from time import sleep

COPIES = ThreadPoolExecutor(1)  # a toy's stream: one copy after the other
HOST = {}


class Copied:
    def __init__(self, future):
        self.future = future

    def wait(self):
        self.future.result()


class Copy(ops.Beside):
    def __init__(self, shared, action):
        super().__init__(action)
        self.state = shared.states[action.stage, action.microbatch]

    def begin(self):
        return [Copied(COPIES.submit(self.run))]


class Offload(Copy):
    def run(self):
        sleep(2e-3)
        HOST[self.state] = self.state.leaves, self.state.edges
        self.state.leaves, self.state.edges = [], []


class Fetch(Copy):
    def run(self):
        sleep(2e-3)
        self.state.leaves, self.state.edges = HOST.pop(self.state)


OPERATIONS[Kind.D] = lambda shared, action: [Offload(shared, action)]
OPERATIONS[Kind.U] = lambda shared, action: [Fetch(shared, action)]
"""
EDITS: dict[str, list[tuple[str | None, str]]] = {  # per file, what is written after which line; None: at its end
    "core/action.py": [('    R = "R"', KINDS)],
    "core/dataflow.py": [
        ('    WEIGHT_GRADIENT = "', CONTENTS),
        ('    REDUCE = "', STREAMS),
        ("DATAFLOW: dict[Kind, Flow] = {", ROWS),
    ],
    "runtime/program/actions.py": [(None, OPERATIONS)],
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, to which the kinds were added."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(PACKAGE, folder / "pipeflow", ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in EDITS.items():
        lines = (folder / "pipeflow" / name).read_text().split("\n")
        for anchor, text in edits:
            places = [place for place, line in enumerate(lines) if anchor is not None and line.startswith(anchor)]
            (place,) = places or [len(lines)]
            lines[place + 1 : place + 1] = text.strip("\n").split("\n")
        (folder / "pipeflow" / name).write_text("\n".join(lines))
    return folder


def test_at_most_three_files_are_touched() -> None:
    assert len(EDITS) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["verified", "simulated", "counted", "drawn", "written", "priced", "searched", "lowered", "ran"]
)
def test_a_new_kind_is(check: str, extended: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(extended), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CHECKS), check], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_no_other_test_fails_for_it(extended: Path) -> None:
    tests = [str(CHECKS.parent / "test_dataflow.py"), str(CHECKS.parent / "test_cost.py")]
    tests += [str(CHECKS.parents[1] / "soundness" / name) for name in ("test_schedule.py", "test_brute_force.py")]
    run = f"import sys, pipeflow, pytest; sys.exit(pytest.main(['-q', '-x', '-m', 'not slow', *{tests}]))"
    environment = os.environ | {"PYTHONPATH": str(extended), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", run],
        env=environment,
        cwd=extended,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
