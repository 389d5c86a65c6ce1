"""The script for torch's API: the same losses on both engines, under schedules with one stage per rank and with two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES
from tests.scripts import run_ranks

SCRIPT = EXAMPLES / "pipelining" / "train.py"


def losses(*options: str) -> list[str]:
    said = run_ranks(SCRIPT, "--steps", "7", *options, ranks=2)
    return re.findall(r"((?:step \d+|held out): loss [\d.]+)", said)


@pytest.mark.exhaustive
def test_both_engines_print_the_same_losses() -> None:
    found = losses("--evaluate")
    assert len(found) == 4
    assert found == losses("--library", "torch.distributed.pipelining", "--evaluate")
    assert found[:3] == losses("--schedule", "ZBVZeroBubble") == losses("--schedule", "zb-h1")


@pytest.mark.exhaustive
def test_a_run_goes_on_from_the_states_of_its_ranks(tmp_path: Path) -> None:
    folder, whole = ("--folder", str(tmp_path / "run")), losses()  # of the steps 0, 5 and 6
    assert losses(*folder, "--steps", "5")[0] == whole[0]
    assert losses(*folder) == whole[1:]
