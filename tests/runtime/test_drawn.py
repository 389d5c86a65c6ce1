"""Schedules that somebody drew run as drawn, and give the gradients of the plain model."""

from __future__ import annotations

from typing import Any

import pytest

from pipeflow import Placement, Schedule, execute_pipeline, verify
from pipeflow.core.dataflow import Stream
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.program.pairs import Half
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import KeywordModel, TiedModel, TinyModel, TreeModel
from tests.runtime.work import Gradients, build, drawn_at_random, gradients_of, require_near

BY_HAND = {
    "backwards in the opposite order": Schedule.from_csv("0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0"),
    "microbatches crossed": Schedule.from_csv("0F1,0F0,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1F2,1B1,1B2"),
    "a rank of its own pace": Schedule.from_csv(
        "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3"
    ),
    "a vee": Schedule.from_csv("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1", Placement.vee(2)),
    "a vee of three": Schedule.from_csv(
        "0F0,0F1,5F0,5B0,5F1,5B1,0B0,0B1\n1F0,1F1,4F0,4F1,4B0,4B1,1B0,1B1\n2F0,3F0,2F1,3F1,3B0,2B0,3B1,2B1",
        Placement.vee(3),
    ),
    "two neighbours on one rank": Schedule.from_csv(
        "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,3F0,3B0,2B0,2F1,3F1,3B1,2B1", Placement(((0, 0, 1, 1),))
    ),
    "more stages on one rank": Schedule.from_csv(
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,1B0,1B1", Placement(((0, 1, 0),))
    ),
}
MODELS: list[TinyModel] = [TiedModel(8), KeywordModel(8), TreeModel(8)]


def backward_first(forward: Half, backward: Half) -> None:
    backward()
    forward()


def run_as_drawn(model: TinyModel, schedule: Schedule) -> tuple[float | None, Gradients]:
    """Three steps, the last one traced; the gradients are those of the last. Pairs run backward first, or apart."""
    pipeline = build(model, schedule, overlap=backward_first if schedule.num_microbatches % 2 else None)
    for seed in range(3):
        pipeline.zero_grad()
        batch = model.batch(2 * schedule.num_microbatches + 1, seed=seed)
        output = execute_pipeline(iter([batch]), pipeline, trace=seed == 2)
    assert output.timeline is not None
    row = output.timeline.on(Stream.COMPUTE)[current_context().pipeline_rank]
    assert [span.action for span in row] == list(schedule.actions(current_context().pipeline_rank))
    return None if output.loss is None else output.loss.item(), gradients_of(pipeline)


def require_as_plain(model: TinyModel, schedule: Schedule, results: list[tuple[float | None, Gradients]]) -> None:
    loss, gradients = model.plain_step(model.batch(2 * schedule.num_microbatches + 1, seed=2))
    last = schedule.placement.ranks_of(schedule.placement.num_stages - 1)
    for rank, (told, mine) in enumerate(results):
        assert told is None if rank not in last else told == pytest.approx(loss.item(), rel=1e-12)
        require_near(mine, gradients)
    assert {name for _, mine in results for name in mine} == set(gradients)


@pytest.mark.some(7)
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str, model: TinyModel) -> None:
    schedule = BY_HAND[name]
    require_as_plain(model, schedule, run_threads(run_as_drawn, schedule.placement.num_ranks, model, schedule))


@pytest.mark.parametrize("first", [0, *(pytest.param(m, marks=pytest.mark.exhaustive) for m in range(20, 120, 20))])
def test_at_random(first: int) -> None:
    for seed in range(first, first + 20):
        schedule, model = drawn_at_random(seed), MODELS[seed % 3]
        assert verify(schedule) == []
        require_as_plain(model, schedule, run_threads(run_as_drawn, schedule.placement.num_ranks, model, schedule))


def run_all(cases: list[tuple[TinyModel, Schedule]]) -> list[Any]:
    return [run_as_drawn(model, schedule) for model, schedule in cases]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.exhaustive
def test_gloo(ranks: int) -> None:
    schedules = [*BY_HAND.values(), *(drawn_at_random(seed) for seed in range(60))]
    fitting = [schedule for schedule in schedules if schedule.placement.num_ranks == ranks]
    cases = [(MODELS[index % 3], schedule) for index, schedule in enumerate(fitting)]
    columns = run_processes(run_all, ranks, cases)
    for index, (model, schedule) in enumerate(cases):
        require_as_plain(model, schedule, [column[index] for column in columns])
