"""An elastic world goes on without the ranks that died, as one that never had them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD

from pipeflow import (
    Divided,
    Pipeline,
    PipelineError,
    Schedule,
    UsageError,
    Whole,
    Zero,
    execute_pipeline,
    launch,
    make_schedule,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.launcher import _require_elastic
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.rendezvous import RUN_ID
from pipeflow.engine.runtime.elastic import Retried
from pipeflow.engine.runtime.stage import Stage
from pipeflow.testing import die, run_processes, run_threads
from pipeflow.testing.models import PlainModel, TiedModel, TinyModel
from tests.covering import some_rows
from tests.runtime.going_on import Death, Trained, batch_of, build, of_replica, train, train_table

WHEN = ("half of the agreement", "read", "forward", "backward", "sums", "agreement")


def trained(
    model: TinyModel, deaths: tuple[Death, ...], ranks: int = 4, data: int = 2, **options: Any
) -> list[Trained]:
    def run() -> Trained:
        return train(model, deaths, **options)

    return run_threads(run, ranks, data=data, elastic=True, deadline=90, timeout=20)


def left(results: list[Trained], deaths: tuple[Death, ...]) -> list[Trained]:
    return [result for rank, result in enumerate(results) if rank not in {death.rank for death in deaths}]


def near(losses: list[float | None], expected: list[float | None]) -> bool:
    return all(a is b is None or a == pytest.approx(b, rel=1e-12) for a, b in zip(losses, expected, strict=True))


def require_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert numpy.array_equal(one[name], other[name]), name


CASES = [*product(range(4), WHEN)]


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize(("rank", "when"), some_rows(CASES, [*zip((0, 1, 2, 3, 1, 2), WHEN, strict=True)]))
def test_ranks_that_are_left_end_the_step_as_if_they_had_their_table_from_its_start(rank: int, when: str) -> None:
    deaths, model = (Death(rank, 1, when),), TiedModel()
    results = left(trained(model, deaths), deaths)
    assert Schedule.of_survivors is not None
    begin = 1 + (when == "half of the agreement")  # since ranks had ended the step, all end it
    table, stages = Schedule.of_survivors(of_replica(2), 2, [rank]), [each.before[begin] for each in results]
    expected = run_threads(train_table, 3, model, table, 2, stages, begin, deadline=60, timeout=20)
    for mine, its in zip(results, expected, strict=True):
        assert mine.losses[begin:] == its.losses
        require_equal(mine.stages, its.stages)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("model", [TiedModel(), PlainModel()], ids=["tied", "plain"])
def test_it_trains_as_without_deaths(model: TinyModel) -> None:
    deaths = (Death(0, 1, "backward"), Death(4, 2, "forward"))
    whole = trained(model, (), 6, 3, momentum=0.9, clips=True, ends=True)
    results = trained(model, deaths, 6, 3, momentum=0.9, clips=True, ends=True)
    for mine, its in zip(results, whole, strict=True):
        if mine is not None:
            assert mine.living == (1, 2, 3, 5)
            assert mine.read == its.read
            assert near(mine.losses, its.losses)
            assert mine.norms == pytest.approx(its.norms, rel=1e-12)
            for name, each in its.stages.items():
                assert numpy.allclose(mine.stages[name], each, rtol=1e-12, atol=1e-14), name
            for output, expected in zip(mine.outputs, its.outputs, strict=True):
                assert output is expected is None or numpy.allclose(output, expected, rtol=1e-12)


def require_near(results: list[Trained], whole: list[Trained], living: tuple[int, ...]) -> None:
    for rank in living:
        mine, its = results[rank], whole[rank]
        assert (mine.living, mine.read) == (living, its.read)
        assert near(mine.losses, its.losses)
        for name, each in its.stages.items():
            assert numpy.allclose(mine.stages[name], each, rtol=1e-12, atol=1e-14), name


SEVERAL = [
    (Death(0, 1), Death(3, 1)),
    (Death(1, 1, "backward"), Death(2, 1, "recovery")),
    (Death(0, 1), Death(3, 1, "recovery"), Death(4, 3, "sums")),
]


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("deaths", SEVERAL, ids=["together", "in the recovery", "one after the other"])
def test_several_deaths(deaths: tuple[Death, ...]) -> None:
    living = tuple(sorted(set(range(6)) - {death.rank for death in deaths}))
    require_near(trained(TiedModel(), deaths, 6, 3), trained(TiedModel(), (), 6, 3), living)


KILLED = [
    (Death(0, 1, "forward"),),
    (Death(3, 1, "half of the agreement"),),
    (Death(2, 1, "read"), Death(5, 1, "recovery")),
    (Death(0, 1, "sums"), Death(3, 2, "backward")),
]


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("deaths", KILLED, ids=["first", "end", "in the recovery", "its successor"])
def test_processes_that_are_killed(deaths: tuple[Death, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # it tells of every broken connection
    ranks, dead = 4 if len(deaths) == 1 else 6, [death.rank for death in deaths]
    options: dict[str, Any] = {"data": ranks // 2, "elastic": True, "deadline": 200, "timeout": 60}
    results = run_processes(train, ranks, TiedModel(), deaths, may_die=dead, **options)
    living = tuple(sorted(set(range(ranks)) - set(dead)))
    require_near(results, trained(TiedModel(), (), ranks, ranks // 2), living)


@pytest.mark.parametrize(
    ("dead", "expected"),
    [
        ((0, 1), "no rank is left of replica 0, so nobody reads its batches: start again"),
        (
            (1, 3),
            "no rank is left that holds the stages of pipeline rank 1: start again from the newest checkpoint, on 2",
        ),
    ],
    ids=["replica", "stage"],
)
def test_what_no_rank_has_any_more_is_an_error(dead: tuple[int, ...], expected: str) -> None:
    def run() -> tuple[str, bool]:
        context = current_context()
        pipeline, rank = build(TiedModel(), of_replica(2)), context.rank
        if rank in dead:
            die()
        batch = batch_of(TiedModel(), 0, context.data_rank)
        with pytest.raises(PipelineError) as error:
            execute_pipeline(iter([batch]), pipeline)
        with pytest.raises(PipelineError) as again:
            execute_pipeline(iter([batch]), pipeline)
        return str(error.value), str(again.value) == str(error.value)

    for told in filter(None, run_threads(run, 4, data=2, elastic=True, deadline=60, timeout=20)):
        assert expected in told[0]
        assert told[1]


def test_outputs_that_no_rank_has_are_an_error() -> None:
    def run() -> str:
        context = current_context()
        pipeline = build(TiedModel(), of_replica(2))
        if context.rank == 3:
            die()
        with pytest.raises(UsageError) as error:
            execute_pipeline(iter([batch_of(TiedModel(), 0, context.data_rank)]), pipeline, return_outputs=True)
        return str(error.value)

    told = run_threads(run, 4, data=2, elastic=True, deadline=60, timeout=20)
    assert all("no rank is left of replica 1 that has the last stage" in each for each in told[:3])


def test_buffers_stay_those_of_all_ranks_with_the_stage() -> None:
    def run() -> Any:
        context = current_context()
        rank = context.rank
        chunk: Any = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
        pipeline = Pipeline(chunk, of_replica(2), criterion=nn.MSELoss())
        for step in range(3):
            batch = torch.randn(
                2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9 * step + rank // 2)
            )
            if (rank, step) == (1, 1):
                die()
            execute_pipeline(iter([tuple(batch)]), pipeline)
        return chunk[1].running_mean.numpy(), int(chunk[1].num_batches_tracked)

    first, _, other, _ = run_threads(run, 4, data=2, elastic=True, deadline=60, timeout=20)
    assert numpy.array_equal(first[0], other[0])
    assert first[1] == other[1] == 12


def test_a_step_that_runs_again_starts_from_what_it_started_from() -> None:
    module: Any = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    stage, batches = Stage(0, module), iter(["first", "second"])
    weight = module[0].weight
    weight.grad = torch.ones(3)
    retried = Retried(batches, module, [stage], torch.device("cpu"))
    drawn, inputs = [], torch.arange(12.0).view(4, 3)
    for _ in range(3):
        assert list(retried.begin()) == ["first"]
        assert torch.equal(weight.grad, torch.ones(3))
        output = module(inputs)
        output.sum().backward()
        drawn.append((output.detach(), module[0].running_mean.clone()))
    assert all(torch.equal(one, other) for each in drawn[1:] for one, other in zip(each, drawn[0], strict=True))
    assert next(batches) == "second"


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "slices": (lambda: make_schedule("1f1b", ranks=2, microbatches=4, slices=2), {}, "does not go on with slices"),
    "graph": (lambda: of_replica(2), {"graph": True}, "does not go on with graph=True"),
    "loss": (lambda: make_schedule("gpipe", ranks=2, microbatches=4), {"loss_over": "batch"}, "loss_over"),
    "overlap": (lambda: of_replica(2), {"overlap": lambda one, other: (one(), other())}, "go on with overlap="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pipeline_that_could_not_go_on_is_refused(name: str) -> None:
    make, options, expected = REFUSED[name]

    def run() -> str:
        with pytest.raises(UsageError) as error:
            Pipeline(nn.Linear(6, 6), make(), criterion=nn.MSELoss(), **options)
        return str(error.value)

    assert all(expected in told for told in run_threads(run, 4, data=2, elastic=True, deadline=60, timeout=20))


STEPS_REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "divided": (lambda x, y: Divided([(x[:1], y[:1])] * 4), {}, "without pipeflow.Divided, Along and Whole"),
    "whole": (lambda x, y: (x, Whole(y)), {}, "without pipeflow.Divided, Along and Whole"),
    "inputs": (lambda x, y: (x.clone().requires_grad_(), y), {}, "computes no gradients of inputs"),
    "reduce": (lambda x, y: (x, y), {"reduce": False}, "reduce=False leaves gradients on one replica"),
}


@pytest.mark.parametrize("name", STEPS_REFUSED)
def test_a_step_that_could_not_run_again_is_refused_before_a_rank_dies(name: str) -> None:
    make, options, expected = STEPS_REFUSED[name]

    def run() -> str:
        pipeline = build(PlainModel(), of_replica(2))
        with pytest.raises(UsageError) as error:
            execute_pipeline(iter([make(*PlainModel().batch(8))]), pipeline, **options)
        return str(error.value)

    assert all(expected in told for told in run_threads(run, 4, data=2, elastic=True, deadline=60, timeout=20))


def test_what_keeps_states_on_one_replica_is_refused() -> None:
    def run() -> str:
        pipeline = build(PlainModel(), of_replica(2))
        with pytest.raises(UsageError) as error:
            Zero(pipeline, SGD(pipeline.parameters(), lr=0.1))
        return str(error.value)

    told = run_threads(run, 4, data=2, elastic=True, deadline=60, timeout=20)
    assert all("elastic=True would lose those of a rank that dies" in each for each in told)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tensor": 2}, "goes on with pipeline and data ranks alone, and tensor is 2"),
        ({"context": 2}, "goes on with pipeline and data ranks alone, and context is 2"),
        ({"experts": 2}, "goes on with pipeline and data ranks alone, and experts is 2"),
        ({"pipeline": 4}, "needs replicas, and there is one: if a rank died, nobody would have its stages"),
        ({"data": 4}, "4 processes are 2 replicas, not 4: start 8 processes"),
        ({"pipeline": 4, "data": 2}, "4 processes are 1 replica, not 2: start 8 processes"),
    ],
    ids=["tensor", "context", "experts", "one", "data", "one of two"],
)
def test_a_launch_that_could_not_go_on_is_refused(
    arguments: dict[str, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    pipeline = 2 if {*arguments} <= {"data"} else 1
    with pytest.raises(UsageError, match=expected):
        launch(**{"pipeline": pipeline, "elastic": True, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(("starter", "named"), [("none", 1), (RUN_ID, 0)])
def test_a_starter_that_ends_all_ranks_is_named_once(
    starter: str, named: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", starter)
    for rank in range(4):
        _require_elastic(WorldLayout(pipeline=2, data=2), rank)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "torchrun ends all processes when one of them dies"
    ] * named
