"""DeepSpeed and Megatron-LM themselves, where they are installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.checked import llama, megatron, zero
from pipeflow.checking import check
from pipeflow.testing import run_processes

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_of_deepspeed(tmp_path: Path, stage: int, dtype: torch.dtype) -> None:
    sizes = llama.Sizes(dtype=dtype)
    plain = llama.plain(tmp_path / "plain", sizes)
    run_processes(zero.run, 2, str(tmp_path / "right"), "", sizes, stage)
    result = check(plain, tmp_path / "right")
    assert result.alike, result.first
    assert not result.notes
    assert result.compared["gradients"] == result.compared["updates"] == 78
    run_processes(zero.run, 2, str(tmp_path / "wrong"), "mean for a sum", sizes, stage)
    result = check(plain, tmp_path / "wrong")
    assert result.first is not None
    assert result.cause is not None
    assert (result.first.what, result.first.module, result.cause.name) == ("gradient", "head", "scale")
    assert result.cause.factor == pytest.approx(0.5, rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_tensor_ranks_of_megatron(tmp_path: Path) -> None:
    plain = megatron.plain(tmp_path / "plain")
    run_processes(megatron.run, 2, str(tmp_path / "right"), str(plain))
    result = check(plain, tmp_path / "right")
    assert result.alike, result.first
    assert not result.notes
    assert result.compared["gradients"] == 16
    run_processes(megatron.run, 2, str(tmp_path / "wrong"), str(plain), "scale")
    result = check(plain, tmp_path / "wrong")
    assert result.first is not None
    assert result.cause is not None
    assert (result.first.parameter, result.cause.name, result.cause.factor) == ("up.weight", "scale", 2.0)
