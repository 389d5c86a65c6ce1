"""Tolerances that are measured with a run in a finer dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeflow.checking import check
from pipeflow.core.errors import UsageError
from tests.checking.jobs import train


def test_a_small_fault_of_a_coarse_job(tmp_path: Path) -> None:
    """Four microbatches are alike, and a gradient that is a few percent off is found only with the exact run."""
    one, four, wrong, exact = (tmp_path / name for name in ("one", "four", "wrong", "exact"))
    train(one, dtype=torch.bfloat16, steps=1)
    train(four, dtype=torch.bfloat16, steps=1, microbatches=4)
    train(wrong, dtype=torch.bfloat16, steps=1, fault=("scale", {"name": "blocks.1.up", "factor": 1.1}))
    train(exact, dtype=torch.float32, steps=1)
    assert check(one, four, exact=exact).alike
    assert check(one, wrong).alike
    result = check(one, wrong, exact=exact)
    assert result.first is not None
    assert (result.first.what, result.first.module) == ("gradient", "blocks.1.up")


def test_an_exact_run_must_be_finer(tmp_path: Path) -> None:
    one, other = train(tmp_path / "one", steps=1), train(tmp_path / "other", steps=1)
    with pytest.raises(UsageError, match="is no finer than"):
        check(one, one, exact=other)
