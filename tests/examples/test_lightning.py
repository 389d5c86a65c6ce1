"""The scripts for Lightning: what they log is what the same scripts log without a pipeline, in one process."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES
from tests.scripts import said_by_ranks

pytest.importorskip("lightning", reason="not installed", exc_type=ImportError)
FOLDER = EXAMPLES / "lightning_loops"
IMPORTS = [
    "from pipeflow.lightning import PipelineStrategy\n",
    "from pipeflow.adapters.lightning.fabric import PipelineStrategy\n",
]
SCRIPTS = [
    "language",
    *(
        pytest.param(each, marks=pytest.mark.exhaustive)
        for each in ("autoencoder", "classifier", "images", "fabric_loop")
    ),
]


def plain(script: str) -> tuple[str, int]:
    """A script as it is without a pipeline, and how many lines differ."""
    lines, differ = [], 0
    for line in script.splitlines(keepends=True):
        before, strategy, after = line.partition("strategy=PipelineStrategy(")
        made = "" if line in IMPORTS else before + after.partition("), devices=2, ")[2] if strategy else line
        lines.append(made)
        differ += made != line
    return "".join(lines), differ


def logged(folder: Path, script: Path, ranks: int, run: int = 0) -> list[dict[str, str]]:
    said_by_ranks(script, ranks=ranks, folder=folder, PYTHONPATH=str(FOLDER))
    with next(folder.glob(f"logs/*/version_{run}/metrics.csv")).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_logs_what_it_logs_without_a_pipeline(tmp_path: Path, name: str) -> None:
    text, differ = plain((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert 0 < differ <= 3
    folders = [tmp_path / each for each in ("alone", "together")]
    for each in folders:
        each.mkdir()
    (folders[0] / "script.py").write_text(text, encoding="utf-8")
    expected, found = logged(folders[0], folders[0] / "script.py", 1), logged(folders[1], FOLDER / f"{name}.py", 2)
    assert len(expected) >= 20
    for row, mine in zip(expected, found, strict=True):
        assert {key: float(each) for key, each in mine.items() if each} == pytest.approx(
            {key: float(each) for key, each in row.items() if each}, abs=1e-5
        )


@pytest.mark.slow
def test_images_go_on_from_the_last_epoch_as_if_they_had_not_been_stopped(tmp_path: Path) -> None:
    text = (FOLDER / "images.py").read_text(encoding="utf-8")
    assert '"max_epochs": 8' in text
    for name, epochs in (("one", 1), ("two", 2)):
        script = text.replace('"max_epochs": 8', f'"max_epochs": {epochs}')
        (tmp_path / f"{name}.py").write_text(script, encoding="utf-8")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    expected = logged(whole, tmp_path / "two.py", 2)
    logged(stopped, tmp_path / "one.py", 2)
    found = logged(stopped, tmp_path / "two.py", 2, run=1)
    assert len(found) == 12  # ten batches, their validation, and the test of the best epoch
    assert all(float(row["loss"]) > 0.05 for row in found[:10])
    assert found == [row for row in expected if int(row["epoch"]) > 0]
