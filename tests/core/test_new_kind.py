"""A new kind of action is a new row: docs/howto/kind.md adds it to a copy of the package, in three files, and all
works.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pipeflow
from tests.howto import BLOCK, follow

PACKAGE = Path(pipeflow.__file__).parent
CHECKS = Path(__file__).with_name("spilling.py")

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "kind.md"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, to which the kinds were added."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(PACKAGE, folder / "pipeflow", ignore=shutil.ignore_patterns("__pycache__"))
    follow(PAGE.read_text(encoding="utf-8"), folder, runs=False)
    return folder


def test_at_most_three_files_are_touched() -> None:
    assert len({file for file, kind, _ in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if kind == "diff"}) <= 3


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


@pytest.mark.exhaustive
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
