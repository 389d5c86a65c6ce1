"""The script for accelerate's loop: the same losses as on accelerate itself, in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES
from tests.scripts import run_ranks

pytest.importorskip("accelerate", reason="not installed", exc_type=ImportError)
SCRIPT = EXAMPLES / "accelerate_loop" / "train.py"


def losses(*options: str, ranks: int, script: Path = SCRIPT) -> list[str]:
    said = run_ranks(script, "--epochs", "3", *options, ranks=ranks)
    return re.findall(r"epoch \d+: loss ([\d.]+, held out [\d.]+)", said)


@pytest.mark.exhaustive
def test_a_pipeline_prints_the_losses_of_one_process_and_goes_on_with_them(tmp_path: Path) -> None:
    expected = losses("--library", "accelerate", ranks=1)
    assert len(expected) == 3
    folder = "--folder", str(tmp_path)
    assert losses(*folder, "--epochs", "1", ranks=2) == expected[:1]
    assert losses(*folder, "--schedule", "zb-v", ranks=2) == expected[1:]


@pytest.mark.slow
def test_a_run_goes_on_from_the_last_state_that_was_saved_whole(tmp_path: Path) -> None:
    text, script = SCRIPT.read_text(encoding="utf-8"), tmp_path / "stopped.py"
    script.write_text(text.replace("unfinished.rename(", "epoch == 0 and unfinished.rename("), encoding="utf-8")
    folder = "--folder", str(tmp_path / "run")
    first, second = losses(*folder, "--epochs", "2", ranks=2, script=script)
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["epoch-1", "unfinished"]
    assert losses(*folder, "--epochs", "2", ranks=2) == [second] != [first]
