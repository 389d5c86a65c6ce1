"""The shortest training script: its losses do not depend on the layout, and few of its lines are about one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.conftest import GPT3
from tests.scripts import run_ranks

SCRIPT = GPT3 / "trainer.py"


def test_few_lines_are_about_parallelism() -> None:
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    about = [line for line in lines if line.endswith("# parallel")]
    assert 0 < len(about) <= 8
    words = re.compile(r"context|schedule\b|launch|Pipeline\(|--pipeline|--tensor")
    code = "\n".join(lines).split('"""', 2)[2].splitlines()
    assert [line for line in code if words.search(line) and "scheduler" not in line] == about


def losses_of(text: Path, folder: Path, ranks: int, *options: str) -> list[str]:
    folder.mkdir()
    options = ("--steps", "2", "--checkpoints", "checkpoints", *options)
    printed = run_ranks(SCRIPT, *options, ranks=ranks, folder=folder, DATA=str(text), COLUMNS="200")
    return re.findall(r"step +\d+/\d+: loss = ([\d.]+)", printed)


@pytest.mark.exhaustive
def test_every_layout_trains_the_same(text: Path, tmp_path: Path) -> None:
    one = losses_of(text, tmp_path / "one", 1)
    assert len(one) >= 1
    assert losses_of(text, tmp_path / "four", 4, "--pipeline", "2", "--tensor", "2") == one
