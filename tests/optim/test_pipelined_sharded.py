"""The optimizer's step within the schedule, for weights under fully_shard, also if they are gathered ahead: the same
bits as a step after it, whether it stands or is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipeflow import (
    Pipeline,
    PipelinedOptimizer,
    PipelineError,
    Schedule,
    clip_grad_norm_,
    execute_pipeline,
    make_schedule,
    with_offload,
    with_optimizer_step,
    with_recompute,
    with_unshard,
)
from pipeflow.core.cost import CostModel
from pipeflow.engine.parallel.context import current_context
from pipeflow.schedules import SCHEDULES
from pipeflow.testing import run_processes
from pipeflow.testing.models import PlainModel
from tests.families import make_near

CLIP, STEPS = 0.5, 4
MODEL = PlainModel(layers=6)


def one_by_one(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    forward()
    backward()


def build(schedule: Schedule, stages: list[int], over: str) -> Pipeline:
    """This rank's stages, of which some are divided over the replicas, or over the tensor ranks, which then compute the
    same.
    """
    context = current_context()
    placement, mesh = schedule.placement, context.mesh[over]
    chunks = MODEL.chunks(schedule, context.pipeline_rank)
    for stage, chunk in zip(placement.stages_of(context.pipeline_rank), chunks, strict=True):
        if stage in stages:
            fully_shard(chunk, mesh=mesh)
    return Pipeline(chunks, schedule, criterion=MODEL.criterion, overlap=one_by_one)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Some have large labels, so that their gradient is clipped."""
    for step in range(STEPS):
        inputs, labels = MODEL.batch(8, seed=10 * step + current_context().data_rank)
        yield inputs, labels * (8 if step in (1, 2) else 1)


def parts(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The weights and the optimizer's states that this rank holds."""
    weights = optimizer.param_groups[0]["params"]
    found = [*weights, *(each for weight in weights for each in optimizer.state[weight].values())]
    return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in found]


def train_after(pipeline: Pipeline, schedule: Schedule) -> tuple[list[Tensor], int]:
    """Steps the optimizer after each batch. Also returns how often gradients were clipped."""
    optimizer, clipped = torch.optim.AdamW(pipeline.parameters(), lr=1e-2), 0
    for batch in batches():
        execute_pipeline(iter([batch]), pipeline, schedule=schedule)
        clipped += float(clip_grad_norm_(pipeline, CLIP)) > CLIP
        optimizer.step()
        optimizer.zero_grad()
    return parts(optimizer), clipped


def train_ahead(pipeline: Pipeline, schedule: Schedule) -> tuple[list[Tensor], int]:
    """Steps the optimizer within each batch. Also returns how often a step was undone."""
    inner = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    optimizer = PipelinedOptimizer(pipeline, inner, clip_grad_norm=CLIP)
    for batch in batches():
        execute_pipeline(iter([batch]), pipeline, schedule=with_optimizer_step(schedule))
    optimizer.confirm()
    assert optimizer.steps == STEPS
    return parts(inner), optimizer.undone


def compare(given: list[tuple[Schedule, list[Schedule]]], over: str, some: tuple[int, ...] = ()) -> None:
    for plain, others in given:
        stages = [*(some or range(plain.placement.num_stages))]
        wanted, clipped = train_after(build(plain, stages, over), plain)
        for schedule in others:
            found, undone = train_ahead(build(plain, stages, over), schedule)
            assert all(map(torch.equal, found, wanted)), schedule.name
            assert 0 < undone < clipped < STEPS


def schedules(names: tuple[str, ...]) -> list[tuple[Schedule, list[Schedule]]]:
    """Each schedule, and ways to train with it; those in two directions have copies of stages, which take no parts."""
    found = []
    for number, name in enumerate(names):
        plain = make_near(name, ranks=2, microbatches=4)
        ahead = with_unshard(plain, most=2 + number % 2, ahead=0 if number % 2 else None)
        if len(plain.placement.paths) == 1:
            found.append((plain, [ahead, plain]))
    return found


FEW = ("1f1b", "looped-bfs", "zb-v")
NAMES = [
    pytest.param(FEW, id="few"),
    pytest.param(tuple(name for name in SCHEDULES if name not in FEW), marks=pytest.mark.exhaustive, id="others"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", NAMES)
def test_replicas_step_their_parts_within_the_schedule(names: tuple[str, ...]) -> None:
    run_processes(compare, 4, schedules(names), "data", data=2, deadline=400.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", NAMES)
def test_whole_weights_of_a_step_that_is_undone_are_gathered_again(names: tuple[str, ...]) -> None:
    """Without replicas the next forwards run before the step is confirmed."""
    run_processes(compare, 4, schedules(names), "tensor", tensor=2, deadline=400.0)


@pytest.mark.exhaustive
def test_stages_with_different_kinds_step_within_one_schedule() -> None:
    """Stages under fully_shard are gathered; others are recomputed, or offloaded."""
    plain = make_schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=3)
    cost = CostModel.even(plain.placement, offload=0.1)
    mixed = with_unshard(with_recompute(plain, [1, 2]), [0, 3])
    given = [mixed, with_offload(mixed, cost, [4, 5])]
    assert {str(kind) for kind in given[1].kinds} >= {"C", "O", "L", "U", "H"}
    run_processes(compare, 4, [(plain, given)], "tensor", (0, 3), tensor=2)


class Fails(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls_left = -1

    def forward(self, hidden: Tensor) -> Any:
        self.calls_left -= 1
        if not self.calls_left:
            raise ValueError("on purpose")
        return self.inner(hidden)


def train_with_an_error(schedule: Schedule, calls: int, where: str) -> list[Tensor]:
    """Trains; in the third step, a forward or a step of the optimizer fails on all ranks."""
    stages = [Fails(stage) for stage in MODEL.chunks(schedule, 0)]
    for stage in stages:
        fully_shard(stage, mesh=current_context().mesh["data"])
    pipeline = Pipeline(nn.ModuleList(stages), with_optimizer_step(schedule), criterion=MODEL.criterion)
    inner = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    optimizer, step = PipelinedOptimizer(pipeline, inner, clip_grad_norm=CLIP), 0
    take, given = optimizer.step, list(batches())

    def failing(stage: int) -> None:
        optimizer.step = take  # type: ignore[method-assign]
        take(stage)
        raise ValueError("on purpose")

    fails = bool(where)
    while step < STEPS:
        if step == 2 and fails:
            fails = False
            if where == "forward":
                stages[0].calls_left = calls
            else:
                optimizer.step = failing  # type: ignore[method-assign]
            with pytest.raises(PipelineError, match="on purpose"):
                execute_pipeline(iter(given[step:]), pipeline)
            optimizer.confirm()
            assert optimizer.steps == step
        execute_pipeline(iter(given[step:]), pipeline)
        step += 1
    optimizer.confirm()
    return parts(inner)


def compare_with_an_error(given: list[Schedule]) -> None:
    for schedule in given:
        wanted = train_with_an_error(schedule, 0, "")
        for calls, where in ((1, "forward"), (3, "forward"), (0, "step")):
            found = train_with_an_error(schedule, calls, where)
            assert all(map(torch.equal, found, wanted)), (schedule.name, calls, where)


@pytest.mark.exhaustive
def test_after_an_error_training_goes_on_from_the_last_step() -> None:
    looped = make_schedule("looped-bfs", ranks=1, microbatches=4, chunks=2)
    plain = make_schedule("1f1b", ranks=1, microbatches=4)
    run_processes(compare_with_an_error, 2, [plain, with_unshard(plain), with_unshard(looped)], data=2)
