"""Replicas of a pipeline together do a step of the plain model on all of their data."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import (
    CostModel,
    Pipeline,
    PipelineError,
    Placement,
    Schedule,
    Timeline,
    UsageError,
    execute_pipeline,
    make_schedule,
    simulate,
)
from pipeflow.core.analysis.measured_step import measured_costs
from pipeflow.core.dataflow import Stream
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.gradients.step_end import Buffers
from pipeflow.engine.runtime.other_calls import backward
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import KeywordModel, Layer, PlainModel, TiedModel, TinyModel
from pipeflow.testing.ranks import RankError
from tests.runtime.work import Batch, build, gradients_of, plain, require_near, schedule_of, variants

Run = Callable[..., list[Any]]
Trained = tuple[list[float | None], dict[str, Any], dict[str, Any]]


def parts(model: TinyModel, samples: list[int]) -> list[Batch]:
    """A batch for each replica."""
    return [model.batch(count, seed=count) for count in samples]


def whole(model: TinyModel, samples: list[int], steps: int, optimizer: bool = True) -> Trained:
    """What one process makes of all replicas' batches."""
    module = model.stage(0, model.layers)
    losses: list[float | None] = []
    stepper = torch.optim.AdamW(module.parameters(), lr=0.01)
    for _ in range(steps):
        stepper.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in parts(model, samples):
            inputs, labels = part
            output = module(**inputs) if isinstance(inputs, dict) else module(inputs)
            total = total + model.criterion(output, labels) * len(labels) / sum(samples)
        total.backward()
        losses.append(total.item())
        gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        if optimizer:
            stepper.step()
    return losses, gradients, dict(module.named_parameters())


def train(model: TinyModel, schedule: Schedule, samples: list[int], steps: int) -> Trained:
    pipeline = build(model, schedule)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
    losses = []
    batch = parts(model, samples)[current_context().data_rank]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = execute_pipeline(iter([batch]), pipeline).loss
        losses.append(None if loss is None else loss.item())
        gradients = gradients_of(pipeline)
        optimizer.step()
    weights = {name.split(".", 2)[2]: p.detach().numpy().copy() for name, p in pipeline.named_parameters()}
    return losses, gradients, weights


def require_whole(results: list[Trained], expected: Trained) -> None:
    for losses, gradients, weights in results:
        if losses[0] is not None:
            assert losses == pytest.approx(expected[0], rel=1e-12)
        require_near(gradients, expected[1])
        require_near(weights, {name: p.detach() for name, p in expected[2].items()})


CASES = [variant for variant in variants(2, 2) if variant[0] != "dualpipe"] + [("dualpipe", 2, 1)]


@pytest.mark.some(12)
@pytest.mark.parametrize("variant", CASES, ids=str)
@pytest.mark.parametrize("model", [TiedModel(layers=8), KeywordModel(layers=8)], ids=["tied", "keywords"])
def test_training_is_that_of_one_process(model: TinyModel, variant: tuple[str, int, int]) -> None:
    schedule, samples = schedule_of(variant, 4), [5, 8]  # the larger replica's samples count no more than the others
    results = run_threads(train, 2 * variant[1], model, schedule, samples, 3, data=2)
    require_whole(results, whole(model, samples, 3))


@pytest.mark.slow
def test_gloo() -> None:
    model, schedule, samples = TiedModel(), make_schedule("interleaved-1f1b", ranks=2, microbatches=3), [4, 3, 6]
    results = run_processes(train, 6, model, schedule, samples, 3, data=3)
    require_whole(results, whole(model, samples, 3))


def accumulate(model: TinyModel, schedule: Schedule, samples: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two calls, the first without reducing; and its gradients then."""
    pipeline = build(model, schedule)
    batch = parts(model, samples)[current_context().data_rank]
    execute_pipeline(iter([batch]), pipeline, reduce=False)
    alone = gradients_of(pipeline)
    execute_pipeline(iter([batch]), pipeline)
    return alone, gradients_of(pipeline)


def test_accumulation_reduces_once() -> None:
    model, schedule, samples = TiedModel(), make_schedule("1f1b", ranks=2, microbatches=2), [4, 4]
    _, together, _ = whole(model, samples, 1)
    results = run_threads(accumulate, 4, model, schedule, samples, data=2)
    for rank, (alone, both) in enumerate(results):
        _, own = model.plain_step(parts(model, samples)[rank // 2])
        require_near(alone, own)
        require_near(both, {name: 2 * gradient for name, gradient in together.items()})


def step_twice(model: TinyModel, schedule: Schedule, samples: list[int]) -> dict[str, Any]:
    pipeline = build(model, schedule)
    batch = parts(model, samples)[current_context().data_rank]
    for _ in range(2):
        execute_pipeline(iter([batch]), pipeline)
    return gradients_of(pipeline)


def test_gradients_of_two_steps_add_up() -> None:
    model, schedule, samples = TiedModel(), make_schedule("zb-v", ranks=2, microbatches=2), [4, 2]
    _, once, _ = whole(model, samples, 1)
    for gradients in run_threads(step_twice, 4, model, schedule, samples, data=2):
        require_near(gradients, {name: 2 * gradient for name, gradient in once.items()})


class Unlike(nn.Module):
    """Starts differently on every rank; has a parameter that is not used, and one used by some replicas only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.used, self.sometimes, self.unused = (nn.Parameter(torch.full((2,), float(rank))) for _ in range(3))
        self.register_buffer("count", torch.tensor(float(rank)))
        self.rank = rank

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.used + (self.sometimes if self.rank else 0)


def start_unlike() -> tuple[list[float], list[object]]:
    context = current_context()
    module = Unlike(context.rank)
    pipeline = build_of(module, make_schedule("1f1b", ranks=1, microbatches=1))
    values = [value.flatten()[0].item() for value in (*module.parameters(), *module.buffers())]
    execute_pipeline(iter([(torch.ones(1, 2), torch.zeros(1, 2))]), pipeline)
    return values, [None if p.grad is None else p.grad[0].item() for p in module.parameters()]


def build_of(module: nn.Module, schedule: Schedule) -> Pipeline:
    return Pipeline(module, schedule, criterion=nn.functional.mse_loss)


def test_replicas_start_alike_and_agree_on_what_is_used() -> None:
    for values, gradients in run_threads(start_unlike, 2, data=2):
        assert values == [0.0] * 4
        used, sometimes, unused = gradients
        assert (used, unused) == (0.0, None)
        assert sometimes == 0.0


class Broken(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.breaks = breaks

    def forward(self, hidden: Tensor) -> Tensor:
        if self.breaks:
            self.breaks = False
            raise ValueError("on purpose")
        return hidden * self.scale


def fail_once() -> tuple[int | None, float]:
    context = current_context()
    pipeline = build_of(Broken(context.rank == 3), make_schedule("1f1b", ranks=2, microbatches=2))
    batch = (torch.full((2, 2), 2.0), torch.zeros(2, 2))
    try:
        execute_pipeline(iter([batch]), pipeline)
        failed = None
    except PipelineError as error:
        failed = error.rank
    pipeline.zero_grad()
    execute_pipeline(iter([batch]), pipeline)
    [gradient] = [p.grad.item() for p in pipeline.parameters() if p.grad is not None]
    return failed, gradient


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_a_failure_reaches_every_replica_and_the_next_step_is_whole(run: Run) -> None:
    assert run(fail_once, 4, data=2) == [(3, 8.0)] * 4


def die() -> str:
    context = current_context()
    pipeline = build_of(Broken(False), make_schedule("1f1b", ranks=2, microbatches=2))
    batch = (torch.ones(2, 2), torch.zeros(2, 2))
    execute_pipeline(iter([batch]), pipeline)
    if context.rank == 1:
        os._exit(9)
    try:
        execute_pipeline(iter([batch]), pipeline)
    except PipelineError as error:
        return f"{error.died}"
    return "nothing"


@pytest.mark.exhaustive
def test_a_death_is_told_to_every_replica() -> None:
    assert run_processes(die, 4, data=2, may_die=[1]) == ["1", None, "1", "1"]


def build_unlike() -> str:
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    try:
        build_of(nn.Linear(2, 2 + current_context().rank), schedule)
    except UsageError as error:
        return str(error)
    return ""


def test_replicas_must_be_alike() -> None:
    for message in run_threads(build_unlike, 2, data=2):
        assert "rank 1 is a replica of rank 0, but has 'chunks.0.weight': shape (3, 2), torch.float32" in message


def trace_one(model: TinyModel, schedule: Schedule) -> Timeline:
    pipeline = build(model, schedule)
    timeline = execute_pipeline(iter([model.batch(8)]), pipeline, trace=True).timeline
    assert timeline is not None
    return timeline


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_reductions_are_measured_where_they_are_planned(run: Run) -> None:
    schedule = make_schedule("interleaved-1f1b", ranks=2, microbatches=4)
    planned = simulate(schedule.with_reductions(), CostModel.even(schedule.placement, reduce=0.5))
    for timeline in run(trace_one, 4, PlainModel(), schedule, data=2):
        for rank, spans in enumerate(timeline.on(Stream.REDUCE)):
            assert [span.action for span in spans] == [span.action for span in planned.on(Stream.REDUCE)[rank]]
            for span in spans:
                last = max(
                    each.end for each in timeline.on(Stream.COMPUTE)[rank] if each.action.stage == span.action.stage
                )
                assert last <= span.start <= span.end
        assert simulate(schedule.with_reductions(), measured_costs(timeline)).makespan > 0


def square_layers() -> list[nn.Linear]:
    first, second = (nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(2))
    nn.init.constant_(first.weight, 0.5)
    second.weight = first.weight
    return [first, second]


def step_with_a_weight_in_two_stages(schedule: Schedule, inputs: list[Tensor]) -> Any:
    layers = square_layers()
    pipeline = Pipeline(nn.ModuleList(layers), schedule, criterion=nn.functional.mse_loss)
    mine = inputs[current_context().data_rank]
    execute_pipeline(iter([(mine, torch.zeros_like(mine))]), pipeline)
    return plain(layers[0].weight.grad)


def test_a_weight_of_two_stages_is_averaged_when_both_are_done() -> None:
    schedule = Schedule.from_csv("0F0,1F0,1I0,0I0,0W0,1W0", Placement(((0, 0),)))
    inputs = [torch.full((1, 2), value, dtype=torch.float64) for value in (1.0, 3.0)]
    layers = square_layers()
    batch = torch.cat(inputs)
    nn.functional.mse_loss(layers[1](layers[0](batch)), torch.zeros_like(batch)).backward()
    for gradient in run_threads(step_with_a_weight_in_two_stages, 2, schedule, inputs, data=2):
        assert layers[0].weight.grad is not None
        require_near({"weight": gradient}, {"weight": layers[0].weight.grad})


class Normed(nn.Module):
    """A layer with running statistics, if `norm`."""

    def __init__(self, index: int, norm: bool) -> None:
        super().__init__()
        self.layer = Layer(index, torch.float64)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64) if norm else nn.LayerNorm(6, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Any:
        return self.norm(self.layer(hidden))


def train_normed(samples: list[int], norm: bool, by_hand: bool) -> tuple[dict[str, Any], Any]:
    """The statistics after two steps of a stage of this rank, and an evaluation with them."""
    context, model = current_context(), PlainModel()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=2)
    stage = Normed(context.pipeline_rank, norm)
    pipeline = Pipeline(stage, schedule, criterion=model.criterion)
    batch = parts(model, samples)[context.data_rank]
    for _ in range(2):
        if by_hand:
            backward(model.criterion(stage(batch[0]), batch[1]), pipeline)
        else:
            execute_pipeline(iter([batch]), pipeline)
    pipeline.eval()
    loss = execute_pipeline(iter([parts(model, samples)[0]]), pipeline, forward_only=True, broadcast_loss=True).loss
    assert loss is not None
    return {name: plain(buffer) for name, buffer in stage.named_buffers()}, loss.item()


@pytest.mark.parametrize(("ranks", "by_hand"), [(1, False), (2, False), (1, True)])
def test_replicas_have_the_statistics_of_the_first(ranks: int, by_hand: bool) -> None:
    alone = run_threads(train_normed, ranks, [4], True, by_hand)
    found = run_threads(train_normed, 2 * ranks, [4, 6], True, by_hand, data=2)
    for rank, (statistics, loss) in enumerate(found):
        expected, expected_loss = alone[rank % ranks]
        assert statistics.keys() == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
        for name, values in statistics.items():
            assert values == pytest.approx(expected[name], rel=1e-12)
        assert loss == pytest.approx(expected_loss, rel=1e-12)


def test_buffers_that_nobody_changes_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(*_: object) -> None:
        raise AssertionError("shared")

    monkeypatch.setattr(Buffers, "share", share)
    assert len(run_threads(train_normed, 2, [4, 6], False, False, data=2)) == 2
    with pytest.raises(RankError, match="shared"):
        run_threads(train_normed, 2, [4, 6], True, False, data=2)
