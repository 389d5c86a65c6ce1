"""What one does with modules beside training: copies, averages, traces of chunks; and lazy layers."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads

BATCH = torch.ones(4, 2), torch.ones(4, 2)


def pipeline_of(chunk: nn.Module) -> Pipeline:
    schedule = make_schedule("zb-h1", ranks=current_context().pipeline_size, microbatches=2)
    return Pipeline(chunk, schedule, criterion=nn.MSELoss())


def loss_of(pipeline: Pipeline) -> float:
    output = execute_pipeline(iter([BATCH]), pipeline, forward_only=True, broadcast_loss=True)
    assert output.loss is not None
    return output.loss.item()


def run_copying() -> None:
    """A copy trains on its own, and leaves the original as it was."""
    pipeline = pipeline_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    execute_pipeline(iter([BATCH]), pipeline)
    before = loss_of(pipeline)
    other = pipeline_of(copy.deepcopy(pipeline.chunks))
    assert loss_of(other) == before
    other.zero_grad()
    execute_pipeline(iter([BATCH]), other)
    with torch.no_grad():
        for parameter in other.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
    assert loss_of(other) < before
    assert loss_of(pipeline) == before


def run_averaging() -> None:
    pipeline = pipeline_of(nn.Linear(2, 2))
    averaged = AveragedModel(pipeline.chunks)
    before = [parameter.detach().clone() for parameter in pipeline.parameters()]
    averaged.update_parameters(pipeline.chunks)
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.add_(1)
    averaged.update_parameters(pipeline.chunks)
    pipeline_of(averaged.module)
    for parameter, first in zip(averaged.module.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, first + 0.5)


def run_tracing() -> None:
    chunk = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    pipeline = pipeline_of(chunk)
    loss_of(pipeline)
    inputs = torch.ones(1, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.*")  # torch would rather export
        traced = torch.jit.trace(chunk, inputs)
    torch.testing.assert_close(traced(inputs), chunk(inputs))
    torch.testing.assert_close(torch.export.export(chunk, (inputs,)).module()(inputs), chunk(inputs))
    graph = torch.fx.symbolic_trace(chunk)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["0", "1"]
    torch.testing.assert_close(graph(inputs), chunk(inputs))


def run_scripting() -> None:
    chunk = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    pipeline = pipeline_of(chunk)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.*")  # torch would rather export
        with pytest.raises(UsageError, match=r"a Linear that defers .* script a copy"):
            torch.jit.script(chunk)
        scripted = torch.jit.script(copy.deepcopy(chunk))
    torch.testing.assert_close(scripted(BATCH[0]), chunk(BATCH[0]))
    execute_pipeline(iter([BATCH]), pipeline)


@pytest.mark.parametrize(("run", "ranks"), [(run_copying, 2), (run_averaging, 2), (run_tracing, 1), (run_scripting, 1)])
def test_chunks_are_modules_as_any(run: Any, ranks: int) -> None:
    run_threads(run, ranks)


def run_refused() -> None:
    pipeline = pipeline_of(nn.Linear(2, 2))
    for refused in (copy.copy, copy.deepcopy, pickle.dumps, AveragedModel):
        with pytest.raises(UsageError, match="a Pipeline cannot be copied or pickled: copy its chunks, as with"):
            refused(pipeline)
    loss_of(pipeline)


def test_a_pipeline_is_not_copied() -> None:
    run_threads(run_refused, 2)


def run_lazy() -> None:
    with pytest.raises(UsageError, match=r"0.weight has no shape yet: run the lazy layers of a stage once before"):
        pipeline_of(nn.LazyLinear(2))
    chunk = nn.LazyLinear(2)
    chunk(torch.ones(1, 2))
    loss_of(pipeline_of(chunk))


def test_lazy_layers_are_run_once_before() -> None:
    run_threads(run_lazy, 2)
