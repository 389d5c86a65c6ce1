"""What the README shows is run as it stands there, and is short."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from pipeflow.tools.cli.command import main
from tests.guides import blocks, guide, section, side
from tests.scripts import run_ranks

README = guide("README.md")
LOOP, TRAINER = blocks(README, "diff")


@pytest.mark.lint
def test_it_is_short_and_begins_with_what_ran_where_and_a_loop() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert next(number for number, line in enumerate(lines) if "has never run over NCCL" in line) < 25
    assert lines.index("```diff") + LOOP.count("\n") < 60


@pytest.mark.lint
def test_the_loop_changes_by_a_few_lines() -> None:
    added = [line[1:] for line in LOOP.splitlines() if line.startswith("+")]
    code = [line for line in added if line and not line.lstrip().startswith(("#", "import "))]
    assert len(code) == 4
    assert any(line.lstrip().startswith("#") and "no loss.backward()" in line for line in added)


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1, 3])
def test_the_changed_loop_learns_what_the_loop_learns(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop.py").write_text(side(LOOP, "-"), encoding="utf-8")
    (tmp_path / "train.py").write_text(side(LOOP, "+"), encoding="utf-8")
    runpy.run_path(str(tmp_path / "loop.py"))
    expected = re.findall(r"loss ([\d.]+)\n", capsys.readouterr().out)
    said = run_ranks(tmp_path / "train.py", ranks=ranks, folder=tmp_path)
    assert re.findall(r"loss ([\d.]+)\n", said) == expected * ranks
    assert len(expected) == 1


@pytest.mark.lint
def test_the_trainer_changes_as_the_guide_to_transformers_says() -> None:
    """Whose difference `tests/huggingface/test_trainer_docs.py` runs."""
    shown = section(guide("docs/huggingface.md"), "Training with transformers' Trainer")
    assert blocks(shown, "diff") == [TRAINER]


def test_the_explorer_has_a_tour(capsys: pytest.CaptureFixture[str]) -> None:
    [command] = blocks(section(README, "Explore schedules in the browser"), "console")
    assert command == "$ pipeflow explore --tour\n"
    with pytest.raises(SystemExit, match="0"):
        main(["explore", "--help"])
    assert "--tour" in capsys.readouterr().out
