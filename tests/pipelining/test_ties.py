"""Weights of several stages, and of several replicas, under torch's API."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeflow import PipelineSharedModuleWrapper
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes
from tests.pipelining.work import TOLERANCE, Work, batch, difference, mean_loss, serial

pytestmark = pytest.mark.slow


def on_one_rank() -> list[float]:
    """The errors of the gradients of a layer that is in both stages of this rank."""
    work, (inputs, targets) = Work("Interleaved1F1B"), batch()
    first, second = work.schedule.own_stages
    second.submod = first.submod
    whole = Work("Interleaved1F1B").layers
    for stage in (2, 3):
        whole[stage] = whole[stage - 2]
    value = inputs
    for layer in whole:
        value = layer(value)
    mean_loss(value, targets).backward()
    for _ in range(2):
        first.submod.zero_grad()
        work.step(inputs, targets)
    pairs = zip(first.submod.parameters(), whole[first.stage_index].parameters(), strict=True)
    return [difference(mine.grad, its.grad) for mine, its in pairs]


@pytest.mark.exhaustive
def test_a_layer_of_two_stages_of_a_rank() -> None:
    assert max(map(max, run_processes(on_one_rank, 2))) < TOLERANCE


def across_ranks() -> list[float]:
    """The errors of the gradients of a layer of which both ranks have a copy."""
    work, (inputs, targets) = Work("1F1B"), batch()
    PipelineSharedModuleWrapper([0, 1]).register_module(work.layers[dist.get_rank()])
    whole = Work("1F1B").layers
    mean_loss(whole[0](whole[0](inputs)), targets).backward()
    work.step(inputs, targets)
    pairs = zip(work.layers[dist.get_rank()].parameters(), whole[0].parameters(), strict=True)
    return [difference(mine.grad, its.grad) for mine, its in pairs]


def test_a_layer_of_two_ranks() -> None:
    assert max(map(max, run_processes(across_ranks, 2))) < TOLERANCE


def over_replicas(scale_grads: bool) -> float:
    """The error of gradients that two replicas of a pipeline average."""
    context = current_context()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    work = Work("1F1B", group=groups[context.data_rank], scale_grads=scale_grads)
    work.step(*batch(seed=30 + context.data_rank))
    both: list[Any] = [torch.cat(each) for each in zip(batch(seed=30), batch(seed=31), strict=True)]
    return work.error(serial(work.layers, *both)[0], 1 if scale_grads else 4)


@pytest.mark.parametrize("scale_grads", [True, False])
def test_replicas_of_a_pipeline(scale_grads: bool) -> None:
    """A sum over microbatches is averaged over the replicas, as with DistributedDataParallel."""
    found = run_processes(over_replicas, 4, scale_grads, data=2)
    assert max(found) < TOLERANCE


def compiled() -> float:
    """The error of gradients of stages that torch.compile wrapped."""
    work, data = Work("1F1B"), batch()
    whole = serial(work.layers, *data)[0]
    for stage in work.schedule.own_stages:
        stage.submod = torch.compile(stage.submod, backend="eager")
        assert isinstance(stage.submod, nn.Module)
    work.step(*data)
    return work.error(whole)


@pytest.mark.exhaustive
def test_compiled_stages() -> None:
    assert max(run_processes(compiled, 2)) < TOLERANCE
