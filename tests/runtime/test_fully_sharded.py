"""Stages under torch's fully_shard train as they are, and hold but their part of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipeflow import (
    Pipeline,
    PipelineSharedModuleWrapper,
    Schedule,
    UsageError,
    clip_grad_norm_,
    execute_pipeline,
    make_schedule,
)
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes
from pipeflow.testing.models import Layer, PlainModel, TiedModel, TinyModel
from pipeflow.training.optim.clip import grad_norm
from tests.runtime.work import require_near

SCHEDULES = [
    make_schedule("1f1b", ranks=2, microbatches=3),
    make_schedule("zb-h1", ranks=2, microbatches=4),
    make_schedule("interleaved-1f1b", ranks=2, microbatches=4),
    make_schedule("dualpipe-v", ranks=2, microbatches=4),
]


def whole_gradients(pipeline: nn.Module) -> dict[str, Any]:
    named = {name.split(".", 2)[2]: parameter.grad for name, parameter in pipeline.named_parameters()}
    wholes = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named.items() if g is not None}
    assert wholes.keys() == named.keys()
    return {name: whole.numpy().copy() for name, whole in wholes.items()}


def one_by_one(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    forward()
    backward()


def train(model: TinyModel, schedule: Schedule) -> list[Any]:
    """Gradients after a step, after another one, and after two of which one reduces; and their norm then."""
    context = current_context()
    chunks, mesh = model.chunks(schedule, context.pipeline_rank), context.mesh["data"]
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, Layer):
                fully_shard(layer, mesh=mesh)
    model.tie(chunks, schedule)
    pipeline = Pipeline(chunks, schedule, criterion=model.criterion, overlap=one_by_one)
    weights: list[Any] = [layer.linear.weight for layer in chunks.modules() if isinstance(layer, Layer)]
    assert all(weight.to_local().numel() == 18 for weight in weights)
    batch, results = model.batch(4, seed=context.data_rank), []
    for _ in range(2):
        execute_pipeline(iter([batch]), pipeline)
        results.append(whole_gradients(pipeline))
    pipeline.zero_grad()
    for reduce in (False, True):
        execute_pipeline(iter([batch]), pipeline, reduce=reduce)
    results.append(whole_gradients(pipeline))
    norm = clip_grad_norm_(pipeline, 1e-3)
    assert float(grad_norm(pipeline)) == pytest.approx(1e-3, rel=1e-4)
    return [*results, norm.item()]


def train_all(model: TinyModel) -> list[list[Any]]:
    return [train(model, schedule) for schedule in SCHEDULES]


@pytest.mark.slow
def test_gradients_are_the_plain_models() -> None:
    for model in (PlainModel(), TiedModel()):  # the tied words are left out of fully_shard
        module = model.stage(0, model.layers)
        for seed in (0, 1):
            _, summed = model.plain_step(model.batch(4, seed=seed), module)
        for results in run_processes(train_all, 4, model, data=2):
            for once, twice, accumulated, norm in results:
                assert norm == pytest.approx(sum(float(g.square().sum()) for g in summed.values()) ** 0.5, rel=1e-12)
                require_near(once, {name: gradient / 2 for name, gradient in summed.items()})
                require_near(twice, summed)
                require_near(accumulated, summed)


def train_within_nodes(model: TinyModel) -> Any:
    """Gradients of a step whose weights two of four replicas divide, and the norm of the gradients."""
    context, schedule = current_context(), make_schedule("1f1b", ranks=1, microbatches=2)
    chunks = model.chunks(schedule, 0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for layer in chunks.modules():
        if isinstance(layer, Layer):
            fully_shard(layer, mesh=mesh)
    pipeline = Pipeline(chunks, schedule, criterion=model.criterion)
    assert all(each.to_local().numel() < each.numel() for each in pipeline.parameters() if isinstance(each, DTensor))
    execute_pipeline(iter([model.batch(4, seed=context.data_rank)]), pipeline)
    return whole_gradients(pipeline), clip_grad_norm_(pipeline, 1e-3).item()


@pytest.mark.slow
def test_replicas_of_a_node_may_divide_the_weights_while_others_have_copies() -> None:
    model = PlainModel()
    module = model.stage(0, model.layers)
    for seed in range(4):
        _, summed = model.plain_step(model.batch(4, seed=seed), module)
    expected = {name: gradient / 4 for name, gradient in summed.items()}
    for gradients, norm in run_processes(train_within_nodes, 4, model, data=4):
        require_near(gradients, expected)
        assert norm == pytest.approx(sum(float(g.square().sum()) for g in expected.values()) ** 0.5, rel=1e-12)


def tie_sharded() -> str:
    context, model = current_context(), TiedModel()
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    chunks = model.chunks(schedule, context.pipeline_rank)
    for chunk in chunks:
        fully_shard(chunk, mesh=context.mesh["data"])
    model.tie(chunks, schedule)
    try:
        Pipeline(chunks, schedule, criterion=model.criterion)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_a_tied_weight_is_refused() -> None:
    for message in run_processes(tie_sharded, 2, data=1):
        assert "cannot be under fully_shard: leave its module out" in message


def tie_sharded_stages() -> str:
    """Two stages of one rank share a weight; under fully_shard each would have its own part of it."""
    context = current_context()
    layers = [Layer(0, torch.float64) for _ in range(2)]
    wrapper = PipelineSharedModuleWrapper([0, 0])
    for layer in layers:
        fully_shard(layer, mesh=context.mesh["data"])
        wrapper.register_module(layer.linear)
    schedule = make_schedule("interleaved-1f1b", ranks=1, chunks=2, microbatches=2)
    try:
        Pipeline(nn.ModuleList(layers), schedule, criterion=nn.functional.mse_loss)
    except UsageError as error:
        return str(error)
    return ""


def test_a_weight_of_two_stages_is_refused() -> None:
    for message in run_processes(tie_sharded_stages, 2, data=2):
        assert "'chunks.0.linear.weight', which other ranks or stages hold too" in message
        assert "cannot be under fully_shard: leave its module out" in message


def shard_too_late(steps: int) -> str:
    """fully_shard after the Pipeline was made, before the first step or after it."""
    context, model = current_context(), PlainModel()
    schedule = make_schedule("1f1b", ranks=1, microbatches=2)
    pipeline = Pipeline(model.chunks(schedule, 0), schedule, criterion=model.criterion)
    for _ in range(steps):
        execute_pipeline(iter([model.batch(4)]), pipeline)
    for layer in pipeline.chunks.modules():
        if isinstance(layer, Layer):
            fully_shard(layer, mesh=context.mesh["data"])
    with pytest.raises(UsageError) as raised:
        execute_pipeline(iter([model.batch(4)]), pipeline)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1])
def test_it_comes_before_the_pipeline(steps: int) -> None:
    for message in run_processes(shard_too_late, 2, steps, data=2):
        assert "fully_shard was applied to 'chunks.0.layers.0.scale' after the Pipeline was made" in message
