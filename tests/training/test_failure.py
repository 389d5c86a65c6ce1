"""A rank that fails or dies among tensor ranks and replicas: all others are told, and those that wait with it wake."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, PipelineError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import ColumnParallelLinear, RowParallelLinear
from pipeflow.testing import run_processes, run_threads

Run = Callable[..., list[Any]]
WIDTH = 4
CULPRIT = 5  # of data 2 x pipeline 2 x tensor 2: replica 1, pipeline rank 0, tensor rank 1


class Stage(nn.Module):
    """Two layers with an all-reduce each way; on one rank something happens in the second call, between them."""

    def __init__(self, happens: Callable[[], None] | None) -> None:
        super().__init__()
        self.first, self.second = ColumnParallelLinear(WIDTH, WIDTH), RowParallelLinear(WIDTH, WIDTH)
        self.happens, self.calls = happens, 0

    def forward(self, hidden: Tensor) -> Tensor:
        hidden, self.calls = self.first(hidden), self.calls + 1
        if self.happens is not None and self.calls == 2:
            self.happens()
        output: Tensor = self.second(hidden)
        return output


def fail() -> None:
    raise ValueError("on purpose")


def die() -> None:
    os._exit(9)


def train(happens: Callable[[], None]) -> tuple[str, float, float]:
    """What the first step raised, how long that took, and the loss of the next one."""
    context = current_context()
    stage = Stage(happens if context.rank == CULPRIT else None)
    for parameter in stage.parameters():
        nn.init.constant_(parameter, 0.5)
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    model = Pipeline(stage, schedule, criterion=nn.functional.mse_loss)
    batch = (torch.ones(4, WIDTH), torch.zeros(4, WIDTH))
    told, started = "nothing", time.monotonic()
    try:
        execute_pipeline(iter([batch]), model)
    except PipelineError as error:
        told = (
            f"{error.died} died"
            if error.died is not None
            else f"{error.rank} in {error.action}: {error.failure.reason}"
        )
    seconds = time.monotonic() - started
    if "died" in told:
        return told, seconds, 0.0
    loss = execute_pipeline(iter([batch]), model, broadcast_loss=True).loss
    assert loss is not None
    return told, seconds, loss.item()


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_an_error_is_told_to_the_whole_world_and_the_next_step_is_whole(run: Run) -> None:
    results = run(train, 8, fail, tensor=2, data=2)
    assert {told for told, _, _ in results} == {f"{CULPRIT} in 0F1: ValueError: on purpose"}
    assert len({loss for _, _, loss in results}) == 1
    assert max(seconds for _, seconds, _ in results) < 5


@pytest.mark.exhaustive
def test_a_death_is_told_to_the_whole_world() -> None:
    results = run_processes(train, 8, die, tensor=2, data=2, may_die=[CULPRIT])
    assert {result[0] for rank, result in enumerate(results) if rank != CULPRIT} == {f"{CULPRIT} died"}
