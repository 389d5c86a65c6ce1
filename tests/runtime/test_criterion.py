"""A loss with parameters of its own: they are the Pipeline's, on the ranks that have the last stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeflow
from pipeflow import Pipeline, Schedule, execute_pipeline
from pipeflow.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.testing.models import PlainModel
from tests.runtime.work import plain, schedule_of

MODEL = PlainModel()


class Centers(nn.Module):
    """The distance from what labels say, seen through a weight that is learnt."""

    def __init__(self, start: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), start, dtype=torch.float64))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return (output * self.weight - labels).square().mean()


def batches(data: int) -> list[tuple[Tensor, Tensor]]:
    return [MODEL.batch(6, seed=seed) for seed in range(data)]


def run_training(schedule: Schedule) -> dict[str, Any]:
    context = current_context()
    criterion = Centers(2.0 + context.data_rank)  # made the same as on the first replica
    pipeline = Pipeline(MODEL.chunks(schedule, context.pipeline_rank), schedule, criterion=criterion)
    execute_pipeline(iter([batches(context.data_size)[context.data_rank]]), pipeline)
    norm = float(pipeflow.grad_norm(pipeline))
    named = {name: plain(value.grad) for name, value in pipeline.named_parameters() if "criterion" in name}
    return {"norm": norm, **named, "value": plain(criterion.weight)}


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_its_gradients_are_summed_averaged_and_clipped(name: str, data: int) -> None:
    schedule = schedule_of((name, 2, 1), 4)
    criterion, stage = Centers(), MODEL.stage(0, MODEL.layers)
    inputs, labels = (torch.cat(parts) for parts in zip(*batches(data), strict=True))
    criterion(stage(inputs), labels).backward()
    assert criterion.weight.grad is not None
    gradients = [parameter.grad for parameter in (*stage.parameters(), criterion.weight) if parameter.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    results = run_threads(run_training, 2 * data, schedule, data=data)
    holders = [result for result in results if "criterion.weight" in result]
    assert len(holders) == data * len(schedule.placement.ranks_of(schedule.placement.num_stages - 1))
    for result in holders:
        assert abs(result["criterion.weight"] - criterion.weight.grad.numpy()).max() <= 1e-12
        assert (result["value"] == 2.0).all()
    for result in results:
        assert result["norm"] == pytest.approx(norm, rel=1e-12)


def run_saving(path: Path) -> None:
    """Saved by two ranks, loaded by one."""
    ranks, rank = current_context().pipeline_size, current_context().pipeline_rank
    schedule = schedule_of(("1f1b", ranks, 1), 2)
    pipeline = Pipeline(MODEL.chunks(schedule, rank), schedule, criterion=Centers(float(ranks)))
    if ranks == 2:
        pipeflow.save_checkpoint(path, pipeline)
    else:
        pipeflow.load_checkpoint(path, pipeline)
        assert pipeline.criterion is not None
        [weight] = pipeline.criterion.parameters()
        assert (weight == 2.0).all()


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    for ranks in (2, 1):
        run_threads(run_saving, ranks, tmp_path / "saved")
