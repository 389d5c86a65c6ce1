"""What the README shows is run as it stands there."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pipeflow
from pipeflow.parallel.context import current_context
from pipeflow.testing import run_threads
from tests.scripts import run_ranks

README = Path(__file__).parent.parent / "README.md"


def test_the_plans_of_the_readme() -> None:
    assert doctest.testfile(str(README), module_relative=False).failed == 0


@pytest.mark.slow
def test_the_picture_of_the_readme_is_the_commands() -> None:
    shown = re.search(r"\$ pipeflow (draw .*?)\n(.*?)```", README.read_text(), re.DOTALL)
    assert shown is not None
    drawn = subprocess.run(
        [sys.executable, "-m", "pipeflow", *shown[1].split()], capture_output=True, text=True, timeout=60, check=True
    )
    assert drawn.stdout.strip() == shown[2].strip()


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.slow
def test_the_training_script_of_the_readme_learns(tmp_path: Path, ranks: int) -> None:
    script = re.search(r"```python\n(import torch.*?)```", README.read_text(), re.DOTALL)
    assert script is not None
    losses = losses_of(script[1], ranks, tmp_path)
    assert len(losses) == 4
    assert losses[-1][1] < losses[0][1] / 2


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_the_trainer_of_the_readme_learns_and_goes_on(tmp_path: Path, ranks: int) -> None:
    script = re.search(r"```python\n(import pipeflow\nimport torch.*?)```", README.read_text(), re.DOTALL)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    said = run_ranks(tmp_path / "train.py", ranks=ranks, folder=tmp_path)
    accuracies = [float(each) for each in re.findall(r"epoch \d/8, test: loss = \S+, accuracy = ([\d.]+)", said)]
    assert len(accuracies) == 8
    assert accuracies[-1] > 0.9 > accuracies[0]
    (tmp_path / "train.py").write_text(script[1].replace("epochs=8", "epochs=9"))
    again = run_ranks(tmp_path / "train.py", ranks=3 - ranks, folder=tmp_path)
    assert re.findall(r"epoch (\d/\d), test", again) == ["9/9"]


def test_the_training_script_of_the_readme_needs_no_word_about_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks compute elsewhere than on the CPU; of the meta device, which has no values, no loss is printed."""
    monkeypatch.setattr(pipeflow, "launch", current_context)
    found = re.search(r"```python\n(import torch.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    script = found[1].replace("range(200)", "range(2)").replace("output.loss:.4f", "output.loss")

    def run() -> tuple[str, set[str]]:
        names: dict[str, Any] = {}
        exec(script, names)
        return str(names["output"].loss), {parameter.device.type for parameter in names["model"].parameters()}

    first, last = run_threads(run, 2, device="meta")
    assert (first[0], first[1], last[1]) == ("None", {"meta"}, {"meta"})
    assert "device='meta'" in last[0]


def test_the_hybrid_script_of_the_readme_needs_no_word_about_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; what has no values is neither clipped nor saved, and no loss is told to all."""
    monkeypatch.setattr(pipeflow, "launch", lambda **_: current_context())
    monkeypatch.setattr(pipeflow, "latest_checkpoint", lambda _: None)
    monkeypatch.setattr(pipeflow, "clip_grad_norm_", lambda *_: None)
    saved: list[str] = []
    monkeypatch.setattr(pipeflow, "save_checkpoint", lambda path, *_, **__: saved.append(path))
    found = re.search(r"```python\n(from collections.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    script = (
        found[1]
        .replace("first + 50", "first + 2")
        .replace("{output.loss:.4f}", "")
        .replace(", broadcast_loss=True", "")
    )

    def run() -> tuple[str, set[str]]:
        names: dict[str, Any] = {}
        exec(script, names)
        return str(names["output"].loss), {parameter.device.type for parameter in names["model"].parameters()}

    found_on = run_threads(run, 4, tensor=2, device="meta")
    assert [("device='meta'" in loss, devices) for loss, devices in found_on] == [(True, {"meta"})] * 2 + [
        (False, {"meta"})
    ] * 2
    assert saved == ["run/step-2"] * 4


@pytest.mark.slow
def test_the_hybrid_script_of_the_readme_goes_on_under_another_layout(tmp_path: Path) -> None:
    script = re.search(r"```python\n(from collections.*?)```", README.read_text(), re.DOTALL)
    assert script is not None
    losses = losses_of(script[1], 4, tmp_path) + losses_of(script[1], 8, tmp_path)
    assert [step for step, _ in losses] == list(range(0, 100, 10))
    assert losses[0][1] > 3 * losses[4][1] > 3 * losses[-1][1]


def losses_of(script: str, ranks: int, folder: Path) -> list[tuple[int, float]]:
    """What a script prints that so many processes run: steps and losses."""
    (folder / "train.py").write_text(script)
    said = run_ranks(folder / "train.py", ranks=ranks, folder=folder)
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", said)]
