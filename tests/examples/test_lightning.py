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


def logged(folder: Path, script: Path, ranks: int) -> list[dict[str, str]]:
    said_by_ranks(script, ranks=ranks, folder=folder, PYTHONPATH=str(FOLDER))
    with next(folder.glob("logs/*/version_0/metrics.csv")).open() as file:
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
