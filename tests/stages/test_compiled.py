"""Stages of whole modules, compiled block by block, make the gradients of eager ones."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch._dynamo.utils import counters

from pipeflow import Pipeline, Schedule, UsageError, execute_pipeline, make_schedule
from pipeflow.testing import run_threads
from tests.compiling import COMPILED
from tests.stages.models import CASES, Case

SPLIT = make_schedule("zb-v", ranks=2, microbatches=3)
PLAIN = make_schedule("1f1b", ranks=2, microbatches=3)
FIRST = ("decoder", SPLIT)
CHOSEN = [name for name in CASES if name != "u-net"]  # its activations in place fail under plain torch.compile, too

pytestmark = [*COMPILED, pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")]


def train(case: Case, schedule: Schedule, compiling: dict[str, Any] | None) -> dict[str, Tensor]:
    model = Pipeline.from_module(case.module(), schedule, case.batch(7), criterion=case.criterion)
    if compiling is not None:
        model.compile(**compiling)
    for _ in range(2):
        model.zero_grad()
        execute_pipeline(iter([case.batch(7)]), model)
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        FIRST,
        *(
            pytest.param(name, schedule, marks=pytest.mark.exhaustive)
            for name in CHOSEN
            for schedule in (SPLIT, PLAIN)
            if (name, schedule) != FIRST
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else value,
)
def test_blocks_of_a_module(name: str, schedule: Schedule) -> None:
    case = CASES[name]
    expected = run_threads(train, 2, case, schedule, None)
    found = run_threads(train, 2, case, schedule, {"backend": "aot_eager"}, deadline=300.0, timeout=120.0)
    assert counters["stats"]["unique_graphs"] > 0
    for mine, its in zip(found, expected, strict=True):
        assert mine.keys() == its.keys()
        for key, gradient in its.items():
            assert float((mine[key] - gradient).abs().max()) <= 1e-9 * float(gradient.abs().max()), key


def compile_so(case: Case, said: str, in_place: bool, blocks: bool, **options: Any) -> None:
    module = case.module()
    if in_place:
        module.get_submodule("layers.1").compile(backend="aot_eager")
    with pytest.raises(UsageError, match=said):
        Pipeline.from_module(module, PLAIN, case.batch(7), **options).compile(blocks=blocks)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("said", "in_place", "blocks", "options"),
    [
        (r"stage \d cannot be compiled whole", False, False, {}),
        (r"layers\.1 is compiled, but its copies in stages would not be", True, True, {}),
    ],
    ids=["whole", "compiled before"],
)
def test_what_cannot_be_compiled(said: str, in_place: bool, blocks: bool, options: dict[str, Any]) -> None:
    run_threads(lambda: compile_so(CASES["decoder"], said, in_place, blocks, **options), 2)


def compile_cut_within() -> str:
    model = Pipeline.from_module(CASES["decoder"].module(), PLAIN, CASES["decoder"].batch(7), cuts=["layers.1.up"])
    try:
        model.compile(backend="aot_eager")
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_a_stage_that_is_cut_within_a_block_is_refused() -> None:
    told = run_threads(compile_cut_within, 2)
    assert all("layers.1 cannot be compiled" in each for each in told)
