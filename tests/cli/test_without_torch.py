"""Plans, and the command, need no torch. Files with drawings, and the explorer, need Python alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not there")

sys.meta_path.insert(0, Refuse())

from pipeflow.tools.cli import main

assert main(["list"]) == 0
layers = {"pipeflow.core.analysis", "pipeflow.core.soundness", "pipeflow.planning"}
heavy = {"networkx", "rich", "json", *layers} & set(sys.modules)
assert not heavy, heavy
for command in ("draw", "simulate", "compare", "verify", "export"):
    assert main([command, "interleaved-1f1b", *(["--csv", "-"] if command == "export" else [])]) == 0
assert main(["diff", "interleaved-1f1b", "zb-v"]) == 0
assert main(["plan", "tiny"]) == 0

import pipeflow
for name in pipeflow.__all__:
    try:
        getattr(pipeflow, name)
    except ImportError as error:
        assert "torch is not there" in str(error)
        print("needs torch:", name)
"""


@pytest.mark.slow
def test_plans_and_the_command_need_no_torch() -> None:
    """And the command starts without what only some of its parts need."""
    argv = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    need_torch = {line.split()[-1] for line in result.stdout.splitlines() if line.startswith("needs torch:")}
    assert {"Pipeline", "execute_pipeline", "launch"} <= need_torch
    assert not need_torch & {"make_schedule", "Schedule", "Timeline", "simulate", "verify", "lower", "SCHEDULES"}


WITH_PYTHON_ALONE = """
import sys
from contextlib import redirect_stderr
from io import StringIO

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "rich", "numpy", "networkx"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())

from pipeflow.tools.cli import main

for argv in (
    ["list"],
    ["compare", "gpipe", "zb-v", "--animate", "-"],
    ["compare", "gpipe", "zb-v", "--svg", "-"],
    *(["draw", "zb-v", f"--{kind}", "-"] for kind in ("svg", "html", "perfetto")),
):
    assert main(argv) == 0, argv
with redirect_stderr(StringIO()) as said:
    assert main(["draw", "zb-v"]) == 2
print(said.getvalue())
"""


@pytest.mark.slow
def test_drawings_in_files_need_python_alone() -> None:
    """So a clone that was not installed shows them. What needs more says how to install it."""
    argv = [sys.executable, "-W", "error", "-c", WITH_PYTHON_ALONE]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(
        "pipeflow: error: this needs rich, which is not installed: "
        "run `pip install .` in the folder of pipeflow's README.md\n\n"
    )
