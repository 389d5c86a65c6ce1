"""Unshards of stages under fully_shard change when weights are gathered, and no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_groups
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipeflow import (
    Action,
    Kind,
    Pipeline,
    PipelineError,
    Schedule,
    UsageError,
    execute_pipeline,
    make_schedule,
    with_unshard,
)
from pipeflow.core.dataflow import Stream
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.gradients.fully_sharded import Unshard, forget_step
from pipeflow.schedules import SCHEDULES
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import Layer, PlainModel
from tests.families import make_near


def sharded(model: PlainModel, schedule: Schedule, *, whole_stages: bool) -> Pipeline:
    """A pipeline whose layers are under fully_shard; or with `whole_stages` every second layer, and then its stages, in
    another precision.
    """
    context = current_context()
    chunks, mesh = model.chunks(schedule, context.pipeline_rank), context.mesh["data"]
    layers = [layer for layer in chunks.modules() if isinstance(layer, Layer)]
    inner, outer = (MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=out) for out in (None, torch.float64))
    for layer in layers[:: 1 + whole_stages]:
        policy = inner if whole_stages else MixedPrecisionPolicy()
        fully_shard(layer, mesh=mesh, reshard_after_forward=not whole_stages, mp_policy=policy)
    for chunk in chunks if whole_stages else ():
        fully_shard(chunk, mesh=mesh, mp_policy=outer)
    return Pipeline(chunks, schedule, criterion=model.criterion, overlap=one_by_one)


def one_by_one(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    forward()
    backward()


def gradients(pipeline: nn.Module) -> list[Any]:
    found = [parameter.grad for parameter in pipeline.parameters()]
    return [(g.to_local() if isinstance(g, DTensor) else g).numpy().copy() for g in found if g is not None]


def settings(pipeline: nn.Module) -> list[Any]:
    modules: list[Any] = [module for module in pipeline.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    return [(group.post_forward_mesh_info is None, group.reshard_after_backward, group.is_sharded) for group in groups]


def stepped(model: PlainModel, schedule: Schedule, given: Schedule, *, whole_stages: bool) -> tuple[list[Any], Any]:
    """The gradients and losses of two steps of which one reduces, after a step of the optimizer."""
    pipeline = sharded(model, schedule, whole_stages=whole_stages)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    batch, found = model.batch(8, seed=current_context().data_rank), []
    for reduce in (True, False, True):
        output = execute_pipeline(iter([batch]), pipeline, schedule=given, reduce=reduce)
        found.append(output.loss if isinstance(output.loss, float) else float(output.loss or 0))
        if reduce:
            found += gradients(pipeline)
            optimizer.step()
            optimizer.zero_grad()
    assert all(is_sharded for *_, is_sharded in settings(pipeline))
    execute_pipeline(iter([batch]), pipeline, schedule=given, forward_only=True)
    return found, [each[:2] for each in settings(pipeline)]


def compared(model: PlainModel, pairs: list[tuple[Schedule, list[Schedule]]]) -> None:
    for number, (plain, others) in enumerate(pairs):
        whole_stages = number % 2 > 0
        wanted, usual = stepped(model, plain, plain, whole_stages=whole_stages)
        for given in others:
            found, after = stepped(model, plain, given, whole_stages=whole_stages)
            assert after == usual
            assert len(found) == len(wanted)
            assert all(map(numpy.array_equal, found, wanted)), given.name


def one_way(name: str) -> bool:
    return len(make_near(name, ranks=2, microbatches=4).placement.paths) == 1


@pytest.mark.slow
def test_gradients_are_bit_equal_in_all_schedules() -> None:
    pairs = []
    for number, name in enumerate(filter(one_way, SCHEDULES)):
        plain = make_near(name, ranks=2, microbatches=4)
        given = with_unshard(plain, most=2 + number % 2, ahead=None if number % 3 else 1)
        pairs.append((plain, [given if number % 2 else given.with_reductions()]))
    looped = make_schedule("looped-bfs", ranks=2, microbatches=4, chunks=3)
    pairs.append((looped, [with_unshard(looped, most=1), with_unshard(looped, stages=[0, 3])]))
    run_processes(compared, 4, PlainModel(layers=6), pairs, data=2)


def counted(model: PlainModel, schedule: Schedule) -> list[Any]:
    """Per step, the gathers of each layer, and whether weights were gathered while a stage computed; and the spans of
    a traced step that are on the stream of gathers.
    """
    gathers, begun = [0], []

    def gather(*arguments: Any, **options: Any) -> Any:
        gathers[0] += 1
        return real(*arguments, **options)

    pipeline = sharded(model, schedule, whole_stages=False)
    real, torch_groups.foreach_all_gather = torch_groups.foreach_all_gather, gather
    batch = model.batch(8, seed=current_context().data_rank)
    for given in (schedule, with_unshard(schedule)):
        gathers[0] = 0
        output = execute_pipeline(iter([batch]), pipeline, schedule=given, trace=given is not schedule)
        begun.append(gathers[0])
    timeline = output.timeline
    return [*begun, None if timeline is None else [str(span.action) for span in timeline.on(Stream.GATHER)[0]]]


@pytest.mark.exhaustive
def test_each_stage_is_gathered_once_for_all_microbatches() -> None:
    schedule = make_schedule("looped-bfs", ranks=2, microbatches=4, chunks=2)
    for without, within, spans in run_processes(counted, 4, PlainModel(layers=8), schedule, data=2):
        assert without == 4 * 2 * 4  # a layer in each forward and backward
        assert within == 4  # each of the layers of two stages
        assert spans == ["0U0", "2U0", "2H0", "0H0"]


def refused(model: PlainModel, schedule: Schedule) -> str:
    chunks = model.chunks(schedule, current_context().pipeline_rank)
    pipeline = Pipeline(chunks, schedule, criterion=model.criterion)
    with pytest.raises(UsageError) as raised:
        execute_pipeline(iter([model.batch(4)]), pipeline, schedule=with_unshard(schedule))
    return str(raised.value)


def test_a_stage_that_is_not_sharded_is_refused() -> None:
    schedule = make_schedule("1f1b", ranks=1, microbatches=2)
    [said] = run_threads(refused, 1, PlainModel(), schedule)
    assert "0U0: stage 0 is not under fully_shard: apply it before the Pipeline is made, or run" in said
    assert "schedule.without_unshards()" in said


class Fails(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls_left = -1

    def forward(self, hidden: torch.Tensor) -> Any:
        self.calls_left -= 1
        if not self.calls_left:
            raise ValueError("on purpose")
        return self.inner(hidden)


def recovered(model: PlainModel, schedule: Schedule) -> None:
    """After a step that fails while weights are whole, and a step of the optimizer, steps are right, with unshards and
    without.
    """
    mesh, batch = current_context().mesh["data"], model.batch(4, seed=current_context().data_rank)
    found = []
    for fails in (False, True):
        stage = Fails(model.stage(0, model.layers))
        fully_shard(stage, mesh=mesh)
        pipeline = Pipeline(nn.ModuleList([stage]), schedule, criterion=model.criterion)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        execute_pipeline(iter([batch]), pipeline)
        if fails:
            stage.calls_left = 2
            with pytest.raises(PipelineError, match="on purpose"):
                execute_pipeline(iter([batch]), pipeline, schedule=with_unshard(schedule))
            stage.calls_left = -1  # a rank that was told earlier has some left
            optimizer.zero_grad()
            execute_pipeline(iter([batch]), pipeline)
        optimizer.step()
        optimizer.zero_grad()
        for given in (schedule, with_unshard(schedule)):
            execute_pipeline(iter([batch]), pipeline, schedule=given)
            found.append(gradients(pipeline))
    assert all(map(numpy.array_equal, found[0], found[2]))
    assert all(map(numpy.array_equal, found[1], found[3]))


@pytest.mark.exhaustive
def test_a_step_after_a_failed_one_has_the_right_weights() -> None:
    run_processes(recovered, 2, PlainModel(), make_schedule("gpipe", ranks=1, microbatches=4), data=2)


def changed_after_a_failure(model: PlainModel, given: list[Schedule]) -> None:
    """After a step that fails in a forward, and new weights, a step has their gradients alone: none of the backwards
    before the failure, and no weights that were whole or on their way then.
    """
    mesh, batch = current_context().mesh["data"], model.batch(4, seed=current_context().data_rank)
    for schedule in given:
        found = []
        for fails in (False, True):
            stages = [Fails(stage) for stage in model.chunks(schedule, 0)]
            for stage in stages:
                fully_shard(stage, mesh=mesh)
            pipeline = Pipeline(nn.ModuleList(stages), schedule, criterion=model.criterion)
            if fails:
                stages[0].calls_left = 3
                with pytest.raises(PipelineError, match="on purpose"):
                    execute_pipeline(iter([batch]), pipeline)
                stages[0].calls_left = -1
                pipeline.zero_grad()
            with torch.no_grad():
                for parameter in pipeline.parameters():
                    assert isinstance(parameter, DTensor)
                    parameter.mul_(1.5)
            execute_pipeline(iter([batch]), pipeline)
            found.append(gradients(pipeline))
        assert all(map(numpy.array_equal, *found)), schedule.name


@pytest.mark.slow
def test_a_failed_step_leaves_no_gradients_and_no_weights() -> None:
    looped = make_schedule("looped-bfs", ranks=1, microbatches=4, chunks=2)
    plain = make_schedule("1f1b", ranks=1, microbatches=4)
    given = [plain, with_unshard(plain), looped, with_unshard(looped)]
    run_processes(changed_after_a_failure, 2, PlainModel(), given, data=2)


def begun_on_one_replica(model: PlainModel) -> None:
    """A step fails on the first replica, which has begun a gather, and before that on the other one."""
    context = current_context()
    stage = fully_shard(model.stage(0, 1), mesh=context.mesh["data"])
    if context.rank == 0:
        Unshard(Action(Kind.U, 0, 0), [stage]).begin()
    forget_step([stage])
    torch.distributed.barrier()  # a rank that waits for the gather never comes here


@pytest.mark.exhaustive
def test_a_gather_that_no_other_replica_begins_is_not_waited_for() -> None:
    run_processes(begun_on_one_replica, 4, PlainModel(), data=2, deadline=90.0)  # the barrier has a group of its own
