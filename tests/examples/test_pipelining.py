"""The script for torch's API: the same losses on both engines, under schedules with one stage per rank and with two."""

from __future__ import annotations

import re

import pytest

from tests.examples.conftest import EXAMPLES
from tests.scripts import run_ranks

SCRIPT = EXAMPLES / "pipelining" / "train.py"


def losses(*options: str) -> list[str]:
    return re.findall(r"step \d+: loss ([\d.]+)", run_ranks(SCRIPT, "--steps", "7", *options, ranks=2))


@pytest.mark.exhaustive
def test_both_engines_print_the_same_losses() -> None:
    found = losses()
    assert len(found) == 3
    assert float(found[-1]) < float(found[0])
    assert found == losses("--library", "torch.distributed.pipelining")
    assert found == losses("--schedule", "ZBVZeroBubble") == losses("--schedule", "zb-h1")
