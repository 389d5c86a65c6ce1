"""Models of transformers as they are: every single cut, one block a stage, several schedules; float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeflow import Pipeline, Schedule, execute_pipeline, make_schedule
from pipeflow.stages.blocks import blocks_of
from pipeflow.stages.planner import Planner
from pipeflow.testing import run_threads
from tests.stages.families import FAMILIES, make

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-9
NAMED = ("llama", "gpt2", "bert", "opt", "bloom", "t5", "vit", "whisper", "glm")
EACH = [pytest.param(name, marks=[] if name in NAMED else [pytest.mark.exhaustive]) for name in FAMILIES]
TWO = make_schedule("1f1b", ranks=2, microbatches=3)
Result = tuple[float | None, dict[str, Tensor], Any]


def step(name: str, schedule: Schedule, cuts: Any) -> Result:
    module, batch = make(transformers, name)
    model = Pipeline.from_module(module, schedule, batch, cuts=cuts)
    output = execute_pipeline(iter([batch]), model, return_outputs=True)
    gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    logits = None if output.outputs is None else output.outputs["logits"]  # type: ignore[index]  # a ModelOutput
    return None if output.loss is None else output.loss.item(), gradients, logits


def plain(name: str) -> tuple[float, dict[str, Tensor], Tensor]:
    """The loss, the gradients and the logits of the module itself, a sample at a time, each weighed by its labels that
    count: many models compute their loss in float32, in which the order of a mean is seen.
    """
    module, batch = make(transformers, name)
    skipped = int(FAMILIES[name][0].endswith(("ForCausalLM", "LMHeadModel")))
    parts = [{key: entry[sample : sample + 1] for key, entry in batch.items()} for sample in range(3)]
    weights = [int((part["labels"][:, skipped:] != -100).sum()) if part["labels"].dim() > 1 else 1 for part in parts]
    outputs = [module(**part) for part in parts]
    loss = sum(output.loss.double() * weight for output, weight in zip(outputs, weights, strict=True)) / sum(weights)
    loss.backward()
    whole = module(**batch).loss.item()
    assert loss.item() == pytest.approx(whole, rel=1e-6)
    gradients = {key: each.grad for key, each in module.named_parameters() if each.grad is not None}
    return loss.item(), gradients, torch.cat([output.logits for output in outputs])


def require_equal(name: str, results: list[Result]) -> None:
    expected_loss, expected, expected_logits = plain(name)
    told = [(loss, logits) for loss, _, logits in results if logits is not None]
    assert told
    for loss, logits in told:
        assert loss == pytest.approx(expected_loss, rel=1e-7)
        assert torch.allclose(logits, expected_logits, rtol=TOLERANCE, atol=TOLERANCE)
    largest = max(float(each.abs().max()) for each in expected.values())
    for _, gradients, _ in results:
        for key, gradient in gradients.items():
            scale = max(float(expected[key].abs().max()), 1e-6 * largest)  # some are 0 but for rounding
            assert (gradient - expected[key]).abs().max() <= TOLERANCE * scale, key
    assert set().union(*(gradients for _, gradients, _ in results)) == set(expected)


def blocks_in(name: str) -> int:
    module, batch = make(transformers, name)
    return len(blocks_of(Planner(module, 1).plan(batch).trace, module, None))


@pytest.mark.parametrize("name", EACH)
def test_every_single_cut(name: str) -> None:
    blocks = blocks_in(name)
    for cut in range(1, blocks):
        costs = [1.0 if block in (cut - 1, cut) else 0.0 for block in range(blocks)]
        require_equal(name, run_threads(step, 2, name, TWO, costs))


@pytest.mark.parametrize("name", EACH)
def test_a_block_for_each_stage(name: str) -> None:
    blocks = blocks_in(name)
    require_equal(name, run_threads(step, blocks, name, make_schedule("1f1b", ranks=blocks, microbatches=3), None))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_schedules(name: str, schedule: str) -> None:
    require_equal(name, run_threads(step, 2, name, make_schedule(schedule, ranks=2, microbatches=3), None))
