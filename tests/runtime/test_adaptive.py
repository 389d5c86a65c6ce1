"""Orders that follow what steps cost: when one is looked for, which one is taken, and that training stays the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeflow import (
    CostModel,
    Kind,
    Pipeline,
    PipelineError,
    Schedule,
    Timeline,
    UsageError,
    execute_pipeline,
    launch,
    make_schedule,
    simulate,
    verify,
)
from pipeflow.engine.parallel.context import Context, current_context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.transport.local import Hub, LocalTransport
from pipeflow.engine.runtime import adaptive
from pipeflow.engine.runtime.adaptive import Adaptation
from pipeflow.schedules import SCHEDULES
from pipeflow.schedules.orders.additions import with_optimizer_step
from pipeflow.testing import run_processes, run_threads

RANKS, MICROBATCHES = 4, 8
TIME = 1.0  # seconds of a step


def costs(*factors: float, latency: float = 0.0) -> CostModel:
    return CostModel(factors, factors, factors, latency=latency)


EVEN = costs(1, 1, 1, 1)


def made(name: str = "1f1b", **options: Any) -> Adaptation:
    """The adaptation of a schedule, in a process of its own."""
    place = torch.device("cpu")
    context = Context(0, WorldLayout(), place, LocalTransport(Hub(1), 0, device=place, timeout=1.0))
    return Adaptation(make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES, **options), context)


def step(adaptation: Adaptation, cost: CostModel, seconds: float = TIME) -> bool:
    """Whether a step is traced. Its costs are shown then."""
    traced = adaptation.traces
    adaptation.saw(seconds, simulate(adaptation.schedule, cost) if traced else None)
    return traced


def settled(name: str = "1f1b", cost: CostModel = EVEN, **options: Any) -> Adaptation:
    """An adaptation that knows the usual time of a step, and has nothing to ignore."""
    adaptation = made(name, **options)
    assert [step(adaptation, cost) for _ in range(6)] == [False, False, True, False, False, False]
    return adaptation


def makespan(schedule: Schedule, cost: CostModel) -> float:
    return simulate(schedule, cost).makespan


def test_the_third_step_gives_a_better_order_within_the_memory() -> None:
    adaptation = settled("1f1b")
    given, found = make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES), adaptation.schedule
    assert verify(found) == []
    assert makespan(found, EVEN) < 0.97 * makespan(given, EVEN)
    assert simulate(found, EVEN).peak_activations <= simulate(given, EVEN).peak_activations
    for mine, theirs in zip(
        simulate(found, EVEN).peak_activations, simulate(given, EVEN).peak_activations, strict=True
    ):
        assert mine <= theirs


@pytest.mark.parametrize("name", [name for name in SCHEDULES if not name.startswith("dualpipe")])
def test_every_schedule_gets_an_order_within_its_memory(name: str) -> None:
    adaptation = made(name)
    given = adaptation.schedule
    times = [1.5 if stage == 1 else 1.0 for stage in range(given.placement.num_stages)]
    slow = costs(*times, latency=0.5)
    assert [step(adaptation, slow) for _ in range(3)] == [False, False, True]
    found = adaptation.schedule
    assert verify(found) == []
    assert found is given or makespan(found, slow) < 0.97 * makespan(given, slow)
    for mine, theirs in zip(
        simulate(found, slow).peak_activations, simulate(given, slow).peak_activations, strict=True
    ):
        assert mine <= theirs + 1e-9


def test_a_single_slow_step_changes_nothing_and_the_next_measurements_come_later() -> None:
    adaptation = settled("1f1b")
    before, slow = adaptation.schedule, costs(1, 1, 1, 9)
    assert not step(adaptation, slow, 2 * TIME)
    assert step(adaptation, slow, TIME)  # traced, and as usual
    assert adaptation.schedule is before
    waits = []
    for _ in range(12):
        steps = 0
        while not step(adaptation, slow, 2 * TIME):
            steps += 1
            if adaptation.traces:
                step(adaptation, slow, TIME)
                break
        waits.append(steps)
    assert waits == [*(1 + 2**many for many in range(11)), 1025]
    assert adaptation.schedule is before


def test_steps_that_differ_by_less_than_a_tenth_are_not_traced() -> None:
    adaptation = settled("1f1b")
    assert not any(step(adaptation, EVEN, seconds) for seconds in (1.09, 0.92, 1.09, 0.92, 1.09))


@pytest.mark.parametrize("seconds", [1.2, 0.8])
def test_two_steps_that_differ_bring_a_better_order(seconds: float) -> None:
    """Also if they are faster: of a rank that is fast again."""
    adaptation = settled("zb-h1", costs(3, 1, 1, 1))
    given = adaptation.schedule
    slow = costs(1, 1, 1, 1, latency=0.5)
    assert not step(adaptation, slow, seconds)
    assert step(adaptation, slow, seconds)
    assert adaptation.schedule != given
    assert makespan(adaptation.schedule, slow) < 0.97 * makespan(given, slow)


def test_an_order_that_saves_too_little_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """A slow stage bounds a pipeline: an order with split backwards is the best already."""
    caplog.set_level(logging.INFO)
    adaptation = settled("zb-h1")
    for cost in (costs(1, 1, 1, 2), EVEN):
        step(adaptation, cost, sum(cost.forward))
        step(adaptation, cost, sum(cost.forward))
    assert adaptation.schedule.name == "zb-h1"
    assert "and rank 3 of the pipeline computes for 2.00 x its time before: no order saves more than 3%" in caplog.text


def test_the_order_of_the_user_comes_back() -> None:
    """It is preferred to one that is no better."""
    adaptation = settled("zb-h1", costs(1, 1, 1, 1, latency=1.0))
    assert adaptation.schedule.name == "zb-h1 (adapted)"
    step(adaptation, EVEN, TIME / 2)
    now = adaptation.schedule
    assert (
        1 - makespan(make_schedule("zb-h1", ranks=RANKS, microbatches=MICROBATCHES), EVEN) / makespan(now, EVEN) > 0.03
    )
    step(adaptation, EVEN, TIME / 2)
    assert adaptation.schedule == make_schedule("zb-h1", ranks=RANKS, microbatches=MICROBATCHES)


def test_an_order_whose_steps_take_longer_is_given_back() -> None:
    adaptation = made("1f1b")
    for _ in range(3):
        step(adaptation, EVEN)
    assert adaptation.schedule.name == "1f1b (adapted)"
    for _ in range(3):
        step(adaptation, EVEN, 1.01 * TIME)
    assert adaptation.schedule.name == "1f1b"
    assert not any(step(adaptation, EVEN) for _ in range(10))


def test_reductions_stay() -> None:
    place = torch.device("cpu")
    context = Context(0, WorldLayout(), place, LocalTransport(Hub(1), 0, device=place, timeout=1.0))
    given = make_schedule("1f1b", ranks=RANKS, microbatches=MICROBATCHES).with_reductions()
    adaptation = Adaptation(given, context)
    for _ in range(3):
        step(adaptation, EVEN)
    assert adaptation.schedule != given
    assert Kind.R in adaptation.schedule.kinds
    assert verify(adaptation.schedule) == []


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (make_schedule("1f1b", ranks=2, microbatches=4, slices=2), "cannot take slices of microbatches yet"),
        (make_schedule("dualpipe", ranks=2, microbatches=4), "'dualpipe' has pairs or other actions"),
        (with_optimizer_step(make_schedule("zb-h1", ranks=2, microbatches=4)), "has pairs or other actions"),
    ],
)
def test_schedules_that_cannot_be_searched_are_refused(schedule: Schedule, said: str) -> None:
    place = torch.device("cpu")
    context = Context(0, WorldLayout(), place, LocalTransport(Hub(1), 0, device=place, timeout=1.0))
    with pytest.raises(UsageError, match=said):
        Adaptation(schedule, context)


STEPS = 8


def model_of(ranks: int, name: str) -> Pipeline:
    schedule = make_schedule(name, ranks=ranks, microbatches=4)
    stages = schedule.placement.stages_of(current_context().pipeline_rank)
    chunks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in stages]
    for stage, chunk in zip(stages, chunks, strict=True):
        for parameter in chunk.parameters():  # ranks are threads, which share torch's own generator
            nn.init.uniform_(parameter, -0.5, 0.5, generator=torch.Generator().manual_seed(stage))
    return Pipeline(nn.ModuleList(chunks), schedule, criterion=functional.mse_loss)


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(number))
    return inputs, labels


def train(ranks: int, name: str, tables: list[Schedule] | None) -> tuple[list[Any], list[Any], list[Schedule]]:
    """Losses, weights, and the schedule of each step: those of `tables`, or those that the steps bring."""
    current_context().adaptive = tables is None
    model, losses, ran = model_of(ranks, name), list[Any](), list[Schedule]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        adaptation = model.runner.adaptation
        ran.append(model.schedule if adaptation is None else adaptation.schedule)
        optimizer.zero_grad()
        output = execute_pipeline(iter([batch_of(number)]), model, schedule=None if tables is None else tables[number])
        assert output.timeline is None
        losses.append(None if output.loss is None else output.loss.item())
        optimizer.step()
    return losses, [each.detach().clone() for each in model.parameters()], ran


def both(ranks: int, name: str) -> tuple[bool, list[Schedule]]:
    losses, weights, tables = train(ranks, name, None)
    others, plain, _ = train(ranks, name, tables)
    return losses == others and all(map(torch.equal, weights, plain)), tables


@pytest.mark.parametrize(
    ("name", "ranks", "data"), [("1f1b", 2, 2), ("interleaved-1f1b", 2, 1), ("1f1b", 3, 1), ("chimera", 4, 1)]
)
@pytest.mark.slow
@pytest.mark.some(2)
def test_training_equals_that_with_the_orders_from_the_start(
    name: str, ranks: int, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks take the same ones, also in replicas that measure other times."""

    def shown(timeline: Timeline, *, late_apart: bool) -> CostModel:
        assert late_apart
        times = [1.0 + 2 * current_context().data_rank * (stage == 0) for stage in range(timeline.placement.num_stages)]
        return costs(*times, latency=0.01)

    monkeypatch.setattr(adaptive, "measured_costs", shown)
    results = run_threads(both, ranks * data, ranks, name, data=data)
    assert all(equal for equal, _ in results)
    tables = results[0][1]
    assert all(each == tables for _, each in results)
    assert tables[2] == make_schedule(name, ranks=ranks, microbatches=4)
    if data == 1:
        assert tables[3].name == f"{name} (adapted)"
    else:  # the slower replica could gain nothing, and the other one waits for it
        assert {each.name for each in tables} == {name}


def other_calls() -> tuple[list[int], list[float]]:
    """The number of steps that the adaptation saw after each of some calls, and their times."""
    current_context().adaptive = True
    model, seen, counts = model_of(2, "1f1b"), list[float](), list[int]()
    adaptation = model.runner.adaptation
    assert adaptation is not None
    adaptation.saw = lambda seconds, timeline: seen.append(seconds)  # type: ignore[method-assign]  # of this object
    calls: list[tuple[int, dict[str, Any]]] = [
        (8, {}),
        (8, {"schedule": model.schedule}),
        (8, {"forward_only": True}),
        (8, {"reduce": False}),  # a step that sums over the replicas takes longer
        (3, {}),  # fewer samples than microbatches
        (8, {"trace": True}),
    ]
    for samples, options in calls:
        inputs, labels = batch_of(0)
        output = execute_pipeline(iter([(inputs[:samples], labels[:samples])]), model, **options)
        assert (output.timeline is not None) == ("trace" in options)
        counts.append(len(seen))
    return counts, seen


def test_only_whole_training_steps_of_the_pipelines_own_schedule_count() -> None:
    (first, times), (second, others) = run_threads(other_calls, 2)
    assert first == second == [1, 1, 1, 1, 1, 2]
    assert times == others  # both know the time of the slower rank
    assert all(0 < seconds < 60 for seconds in times)


def over_batch() -> None:
    current_context().adaptive = True
    schedule = make_schedule("gpipe", ranks=2, microbatches=4)
    with pytest.raises(UsageError, match='loss_over="batch" needs all forwards before the first backward'):
        Pipeline(nn.Linear(6, 6), schedule, criterion=functional.mse_loss, loss_over="batch")


def test_a_loss_over_the_whole_batch_is_refused() -> None:
    run_threads(over_batch, 2)


def failing() -> None:
    """After a failure all ranks begin again: some may have seen a step that others have not."""
    current_context().adaptive = True
    model = model_of(2, "1f1b")
    adaptation = model.runner.adaptation
    assert adaptation is not None
    other = make_schedule("zb-h1", ranks=2, microbatches=4)
    if current_context().rank == 1:
        adaptation.schedule, adaptation.traces = other, True
    handle = model.chunks[0].register_forward_hook(lambda *_: 1 / 0) if current_context().rank == 1 else None
    with pytest.raises(PipelineError):
        execute_pipeline(iter([batch_of(0)]), model, schedule=model.schedule)
    if handle is not None:
        handle.remove()
    assert (adaptation.schedule, adaptation.traces) == (model.schedule, False)
    execute_pipeline(iter([batch_of(0)]), model)


def test_a_failure_brings_the_given_schedule_back() -> None:
    run_threads(failing, 2)


def differing() -> None:
    current_context().adaptive = current_context().rank == 1
    with pytest.raises(UsageError, match=r"rank 1 was given another launch\(adaptive=\) than rank 0: True, not False"):
        model_of(2, "1f1b")


def test_ranks_must_agree_whether_orders_may_change() -> None:
    run_threads(differing, 2)


def alone() -> bool:
    current_context().adaptive = True
    return model_of(1, "1f1b").runner.adaptation is None


def test_a_rank_that_is_alone_has_nothing_to_change() -> None:
    assert run_threads(alone, 1) == [True]


def relaunched() -> bool:
    current_context().close()
    return launch(adaptive=True).adaptive


@pytest.mark.slow
def test_launch_tells_the_context() -> None:
    assert run_processes(relaunched, 1) == [True]
