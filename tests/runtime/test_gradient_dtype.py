"""Gradients of 16-bit weights that are added up in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.optim import MasterWeights
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import PlainModel

WIDTH = 16
HALF = torch.bfloat16


class Scaled(nn.Module):
    """A weight whose gradient is a deferred product, and one that autograd adds up."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).div(4).to(HALF))
        self.scale = nn.Parameter(torch.rand(WIDTH, generator=generator).to(HALF))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.linear(hidden) * self.scale
        return output


def batch(microbatches: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    inputs, labels = (torch.randn(microbatches, WIDTH, generator=generator).to(HALF) + 1 for _ in range(2))
    return inputs, labels


def step(name: str, microbatches: int, dtype: torch.dtype | None) -> list[tuple[str, torch.dtype, list[float], float]]:
    context, schedule = current_context(), make_schedule(name, ranks=2, microbatches=microbatches)
    stages = nn.ModuleList(Scaled(stage) for stage in schedule.placement.stages_of(context.pipeline_rank))
    pipeline = Pipeline(stages, schedule, criterion=functional.mse_loss, gradient_dtype=dtype)
    loss = execute_pipeline(iter([batch(microbatches, context.data_rank)]), pipeline, broadcast_loss=True).loss
    assert loss is not None
    held = schedule.placement.stages_of(context.pipeline_rank)
    return [
        (
            f"{held[int(name.split('.')[1])]}.{name.split('.', 2)[2]}",
            p.grad.dtype,
            p.grad.flatten().tolist(),
            float(loss),
        )
        for name, p in pipeline.named_parameters()
        if p.grad is not None
    ]


def exact(stages: int, microbatches: int, replicas: int) -> tuple[float, dict[str, Tensor]]:
    module = nn.Sequential(*(Scaled(stage) for stage in range(stages))).double()
    parts = [batch(microbatches, replica) for replica in range(replicas)]
    inputs, labels = (torch.cat(part).double() for part in zip(*parts, strict=True))
    loss = functional.mse_loss(module(inputs), labels)
    loss.backward()
    return float(loss.detach()), {name: p.grad.flatten() for name, p in module.named_parameters() if p.grad is not None}


def off(run: Any, name: str, microbatches: int, dtype: torch.dtype | None, replicas: int = 1) -> tuple[float, float]:
    """How far gradients and loss are off, of their own size."""
    results = run(step, 2 * replicas, name, microbatches, dtype, data=replicas)
    told = {name: (values, loss) for result in results for name, _, values, loss in result}
    assert {found for result in results for _, found, _, _ in result} == {dtype or HALF}
    loss, gradients = exact(len(told) // 2, microbatches, replicas)
    assert told.keys() == gradients.keys()
    whole = torch.cat(list(gradients.values()))
    mine = torch.cat([torch.tensor(told[name][0], dtype=torch.float64) for name in gradients])
    return float((mine - whole).norm() / whole.norm()), max(abs(each - loss) / loss for _, each in told.values())


@pytest.mark.some(1)
@pytest.mark.parametrize(("microbatches", "bound"), [(64, 0.002), (512, 0.001)])
def test_float32_keeps_what_bfloat16_loses(microbatches: int, bound: float) -> None:
    narrow, _ = off(run_threads, "1f1b", microbatches, None)
    wide, loss = off(run_threads, "1f1b", microbatches, torch.float32)
    assert wide < bound < narrow
    assert loss < 0.001


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "run"), [("chimera", run_threads), ("zb-h1", run_processes)])
def test_sums_over_ranks_are_float32_too(name: str, run: Any) -> None:
    assert off(run, name, 16, torch.float32, replicas=2)[0] < 0.006


def train_with_masters() -> list[float]:
    stage = Scaled(0)
    pipeline = Pipeline(
        stage,
        make_schedule("1f1b", ranks=1, microbatches=4),
        criterion=functional.mse_loss,
        gradient_dtype=torch.float32,
    )
    optimizer = MasterWeights(pipeline, torch.optim.AdamW(pipeline.parameters(), lr=0.01))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = execute_pipeline(iter([batch(8, 0)]), pipeline).loss
        assert loss is not None
        losses.append(float(loss))
        optimizer.step()
    return losses


def test_masters_step_with_them() -> None:
    [losses] = run_threads(train_with_masters, 1)
    assert losses == sorted(losses, reverse=True)


def convert_to_half() -> list[torch.dtype]:
    rank = current_context().pipeline_rank
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    model = PlainModel(dtype=torch.float32)
    pipeline = Pipeline(
        model.chunks(schedule, rank), schedule, criterion=functional.mse_loss, gradient_dtype=torch.float32
    )
    pipeline.bfloat16()
    inputs, labels = (each.bfloat16() for each in model.batch(4))
    execute_pipeline(iter([(inputs, labels)]), pipeline)
    pipeline.zero_grad()
    execute_pipeline(iter([(inputs, labels)]), pipeline)
    return [each.grad.dtype for each in pipeline.parameters() if each.grad is not None]


def test_parameters_that_are_converted_later_have_wide_gradients() -> None:
    for dtypes in run_threads(convert_to_half, 2):
        assert set(dtypes) == {torch.float32}
