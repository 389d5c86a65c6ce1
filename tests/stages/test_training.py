"""Any module under any schedule equals the module itself: loss, outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from pipeflow import Pipeline, Schedule, execute_pipeline, make_schedule
from pipeflow.engine.stages.blocks import blocks_of
from pipeflow.engine.stages.planner import Planner
from pipeflow.testing import run_threads
from tests.stages.models import CASES, Case

TOLERANCE = 1e-9
TWO = make_schedule("1f1b", ranks=2, microbatches=2)
Stepped = tuple[float | None, dict[str, Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


def step(case: Case, schedule: Schedule, samples: int, options: dict[str, Any]) -> Stepped:
    model = Pipeline.from_module(case.module(), schedule, case.batch(samples), criterion=case.criterion, **options)
    loss = execute_pipeline(iter([case.batch(samples)]), model).loss
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return None if loss is None else loss.item(), gradients


def require_equal(case: Case, results: list[Stepped], samples: int) -> None:
    module = case.module()
    loss = case.plain_loss(module, case.batch(samples))
    loss.backward()
    expected = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    told = [found for found, _ in results if found is not None]
    assert told
    assert all(abs(found - loss.item()) <= TOLERANCE * abs(loss.item()) for found in told)
    for _, gradients in results:
        for name, gradient in gradients.items():
            error = float((gradient - expected[name]).abs().max())
            assert error <= TOLERANCE * float(expected[name].abs().max()), name
    assert set().union(*(gradients for _, gradients in results)) == set(expected)


SCHEDULES = {
    "1f1b": make_schedule("1f1b", ranks=2, microbatches=3),
    "interleaved": make_schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=2),
    "zb-v": make_schedule("zb-v", ranks=2, microbatches=3),
    "dualpipe-v": make_schedule("dualpipe-v", ranks=2, microbatches=4),
    "chimera": make_schedule("chimera", ranks=2, microbatches=4),
    "gpipe-4": make_schedule("gpipe", ranks=4, microbatches=2),
}


@pytest.mark.some(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_module_under_a_schedule(name: str, schedule: str) -> None:
    case, chosen = CASES[name], SCHEDULES[schedule]
    results = run_threads(step, chosen.placement.num_ranks, case, chosen, 7, {})
    require_equal(case, results, 7)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_every_single_cut(name: str) -> None:
    case = CASES[name]
    for cut in range(1, blocks_in(case)):
        costs = [1.0 if block in (cut - 1, cut) else 0.0 for block in range(blocks_in(case))]
        require_equal(case, run_threads(step, 2, case, TWO, 4, {"cuts": costs}), 4)


@pytest.mark.some(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_block_for_each_stage(name: str) -> None:
    case = CASES[name]
    schedule = make_schedule("1f1b", ranks=blocks_in(case), microbatches=2)
    require_equal(case, run_threads(step, blocks_in(case), case, schedule, 4, {}), 4)


@pytest.mark.parametrize("name", ["sequential", "dense"])
def test_blocks_leave_their_weight_gradients_for_later(name: str) -> None:
    """Also those whose calls are watched."""
    case, schedule = CASES[name], SCHEDULES["zb-v"]

    def rank() -> list[set[str]]:
        model = Pipeline.from_module(case.module(), schedule, case.batch(4), criterion=case.criterion)
        for _ in range(2):
            execute_pipeline(iter([case.batch(4)]), model)
        assert all(not deferral.remaining for deferral in model.deferrals.values())
        return [set(deferral.deferred) for deferral in model.deferrals.values()]

    deferred = run_threads(rank, 2)
    names = {name for name, _ in case.module().named_parameters()}
    assert set().union(*(each for names in deferred for each in names)) == names


def blocks_in(case: Case) -> int:
    module = case.module()
    planner = Planner(module, 1)
    entries, _ = planner.entries.of(case.batch(2))
    return len(blocks_of(planner.plan(entries).trace, module, None))
