"""The script for accelerate's loop: the same losses as on accelerate itself, in one process."""

from __future__ import annotations

import re

import pytest

from tests.examples.conftest import EXAMPLES
from tests.scripts import run_ranks

pytest.importorskip("accelerate", reason="not installed", exc_type=ImportError)
SCRIPT = EXAMPLES / "accelerate_loop" / "train.py"


def losses(*options: str, ranks: int) -> list[str]:
    return re.findall(r"epoch \d+: loss ([\d.]+)", run_ranks(SCRIPT, "--epochs", "3", *options, ranks=ranks))


@pytest.mark.exhaustive
def test_a_pipeline_prints_the_losses_of_one_process() -> None:
    found = losses(ranks=2)
    assert len(found) == 3
    assert float(found[-1]) < float(found[0])
    assert found == losses("--library", "accelerate", ranks=1)
