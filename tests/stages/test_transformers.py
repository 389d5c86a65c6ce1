"""Models of transformers as they are: every single cut, one block a stage, several schedules; float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, Schedule, execute_pipeline, make_schedule
from pipeflow.stages.blocks import blocks_of
from pipeflow.stages.planner import Planner
from pipeflow.testing import run_threads
from tests.stages.chain import chained
from tests.stages.families import EVERY, HEADS, KNOWN, make
from tests.stages.family import criterion, floats

transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HERE = [name for name, each in EVERY.items() if hasattr(transformers, each.model)]
SPLIT = [name for name in HERE if not EVERY[name].is_alone]


def each_but(*quick: str, among: list[str] = HERE) -> list[Any]:
    """All families, of which the quick ones alone are not exhaustive."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.exhaustive]) for name in among]


Result = tuple[float | None, dict[str, Tensor], Any]


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Those of all parameters that have one, which is taken away."""
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def require_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Some gradients are 0 but for rounding, so they are measured by the largest of all."""
    largest = max(float(each.abs().max()) for each in expected.values() if each.numel())
    for key, gradient in found.items():
        if gradient.numel():
            scale = max(float(expected[key].abs().max()), 1e-6 * largest)
            assert (gradient - expected[key]).abs().max() <= tolerance * scale, key


def in_stages(module: nn.Module, batch: dict[str, Any], cut: int, blocks: int) -> Any:
    """The output of two stages, cut after a block, one after the other."""
    return chained(module, batch, 2, cuts=[1.0 if block in (cut - 1, cut) else 0.0 for block in range(blocks)])[0]


def blocks_in(name: str) -> int:
    """How many blocks a family's model has."""
    module, batch = make(transformers, name)
    return len(blocks_of(Planner(module, 1).plan(batch).trace, module, None))


@pytest.mark.parametrize("name", each_but("llama", "bert", "t5", "mixtral", "segformer"))
def test_every_single_cut(name: str) -> None:
    """Without ranks: what the stages compute, and the gradients that go back through them."""
    module, batch = make(transformers, name)
    blocks = len(blocks_of(Planner(module, 1).plan(batch).trace, module, None))
    seeded()
    output = module(**EVERY[name].batch())
    criterion(output).backward()
    expected, tolerance = gradients_of(module), EVERY[name].tolerance
    for cut in range(1, blocks):
        seeded()
        found = in_stages(module, EVERY[name].batch(), cut, blocks)
        assert torch.allclose(criterion(found), criterion(output), rtol=max(tolerance, 1e-7))  # float32, of many
        for mine, its in zip(floats(found), floats(output), strict=True):
            assert torch.allclose(mine, its, rtol=tolerance, atol=tolerance)
        criterion(found).backward()
        gradients = gradients_of(module)
        assert gradients.keys() == expected.keys()
        require_near(gradients, expected, tolerance)


def seeded() -> None:
    """Some models draw masks with NumPy."""
    np.random.seed(0)
    torch.manual_seed(0)


def has_loss(name: str) -> bool:
    """Whether the model computes one."""
    return not {"labels", "start_positions", "return_loss", "future_values", "noise"}.isdisjoint(EVERY[name].batch())


def step(name: str, schedule: Schedule) -> Result:
    """A rank's loss, gradients and outputs."""
    module, batch = make(transformers, name)
    seeded()
    model = Pipeline.from_module(module, schedule, batch, criterion=None if has_loss(name) else criterion)
    output = execute_pipeline(iter([batch]), model, return_outputs=True)
    gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    return None if output.loss is None else output.loss.item(), gradients, output.outputs


def plain(name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the module itself, a sample at a time, each weighed by what its mean is over: many
    models compute their loss in float32, in which the order of a mean is seen, and that of experts is one over the
    words of a microbatch.
    """
    module, batch = make(transformers, name)
    family = EVERY[name]
    seeded()
    parts = [batch]
    if not family.is_together:
        parts = [{key: entry[sample : sample + 1] for key, entry in batch.items()} for sample in range(3)]
    weights = [family.weight(part) for part in parts]
    losses = [criterion(module(**part)).double() * weight for part, weight in zip(parts, weights, strict=True)]
    loss = torch.stack(losses).sum() / sum(weights)
    loss.backward()
    return loss.item(), gradients_of(module)


def require_equal(name: str, results: list[Result]) -> None:
    """Compares what ranks found with the plain model."""
    expected_loss, expected = plain(name)
    found = [loss for loss, _, _ in results if loss is not None]
    assert found
    assert found == pytest.approx([expected_loss] * len(found), rel=1e-7)
    for _, gradients, _ in results:
        require_near(gradients, expected, EVERY[name].tolerance)
    assert set().union(*(gradients for _, gradients, _ in results)) == set(expected)
    logits = [output["logits"] for _, _, output in results if output is not None and "logits" in output]
    if logits and not EVERY[name].is_together:
        module, batch = make(transformers, name)
        plain_logits = torch.cat([module(**{k: each[i : i + 1] for k, each in batch.items()}).logits for i in range(3)])
        for each in logits:
            assert torch.allclose(each, plain_logits, rtol=EVERY[name].tolerance, atol=EVERY[name].tolerance)


def samples(name: str) -> int:
    """Into how many microbatches a family's batch may be split."""
    return 1 if EVERY[name].is_together else 3


@pytest.mark.parametrize("name", each_but("llama", "bert", "t5", "mixtral", among=SPLIT))
def test_a_block_for_each_stage(name: str) -> None:
    blocks = blocks_in(name)
    schedule = make_schedule("1f1b", ranks=blocks, microbatches=samples(name))
    require_equal(name, run_threads(step, blocks, name, schedule, deadline=200.0))


QUICK = [("llama", "zb-v"), ("t5", "interleaved-1f1b"), ("mixtral", "dualpipe-v")]
PAIRS = [
    (name, schedule)
    for name in SPLIT
    if name in {**KNOWN, **HEADS}
    for schedule in ("interleaved-1f1b", "zb-v", "dualpipe-v")
]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.exhaustive]) for each in PAIRS],
)
def test_schedules(name: str, schedule: str) -> None:
    if blocks_in(name) < 4:
        pytest.skip("fewer blocks than stages")
    microbatches = 3 if not EVERY[name].is_together else 1
    made = make_schedule(schedule, ranks=2, microbatches=microbatches)
    require_equal(name, run_threads(step, 2, name, made, deadline=200.0))
