"""Models of transformers as they are: every single cut, one block a stage, several schedules; float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import make_schedule
from pipeflow.engine.stages.blocks import blocks_of
from pipeflow.engine.stages.planner import Planner
from pipeflow.testing import run_threads
from tests.stages.chain import chained
from tests.stages.compared import (
    SPLIT,
    each_but,
    gradients_of,
    require_equal,
    require_near,
    samples,
    seeded,
    step,
    transformers,
)
from tests.stages.families import EVERY, HEADS, KNOWN, make
from tests.stages.family import criterion, floats

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def in_stages(module: nn.Module, batch: dict[str, Any], cut: int, blocks: int) -> Any:
    """The output of two stages, cut after a block, one after the other."""
    return chained(module, batch, 2, cuts=[1.0 if block in (cut - 1, cut) else 0.0 for block in range(blocks)])[0]


def blocks_in(name: str) -> int:
    """How many blocks a family's model has."""
    module, batch = make(transformers, name)
    return len(blocks_of(Planner(module, 1).plan(batch).trace, module, None))


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.exhaustive]) for each in PAIRS],
)
def test_schedules(name: str, schedule: str) -> None:
    if blocks_in(name) < 4:
        pytest.skip("fewer blocks than stages")
    made = make_schedule(schedule, ranks=2, microbatches=samples(name))
    require_equal(name, run_threads(step, 2, name, made, deadline=200.0))
