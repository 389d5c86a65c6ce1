"""Models of transformers as they are, over two tensor ranks and pipeline 2 x tensor 2; float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor, nn

from pipeflow import Pipeline, clip_grad_norm_, execute_pipeline, make_schedule
from pipeflow.parallel.sharding import splits_of
from pipeflow.testing import run_threads
from tests.stages.families import FAMILIES, make
from tests.tensor.test_rules import gradients

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TWO = make_schedule("1f1b", ranks=2, microbatches=3)
NAMED = ("llama", "gpt2", "bert", "opt", "vit", "t5")
EACH = [pytest.param(name, marks=[] if name in NAMED else [pytest.mark.exhaustive]) for name in FAMILIES]
ROUNDED = {"gemma2": 1e-6}  # its norms are computed in float32, which rounds by the microbatch's size


@pytest.mark.parametrize("name", EACH)
def test_pipeline_by_tensor(name: str) -> None:
    module, batch = make(transformers, name)
    serial = copy.deepcopy(module)
    expected_loss, expected = _plain(serial, batch)  # first: BEiT keeps a table that its first forward makes

    def rank() -> tuple[float, dict[str, Tensor], float, int]:
        model = Pipeline.from_module(copy.deepcopy(module), TWO, batch)
        output = execute_pipeline(iter([batch]), model, broadcast_loss=True)
        assert output.loss is not None
        return output.loss.item(), gradients(model), clip_grad_norm_(model, 1.0).item(), len(splits_of(model))

    results = run_threads(rank, 4, tensor=2, deadline=200.0)
    norm = nn.utils.clip_grad_norm_(serial.parameters(), 1e9).item()
    largest = max(float(each.abs().max()) for each in expected.values())
    tolerance = ROUNDED.get(name, 1e-9)
    assert {key for _, found, _, _ in results for key in found} == expected.keys()
    for loss, found, its_norm, splits in results:
        assert splits > 0
        assert loss == pytest.approx(expected_loss, rel=1e-6)  # many compute it in float32
        assert its_norm == pytest.approx(norm, rel=tolerance)
        for key, gradient in found.items():
            scale = max(float(expected[key].abs().max()), largest * 1e-3)
            assert (gradient - expected[key]).abs().max() <= tolerance * scale, key


def _plain(module: nn.Module, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    output = module(**batch)
    output.loss.backward()
    return output.loss.item(), {key: each.grad for key, each in module.named_parameters() if each.grad is not None}
