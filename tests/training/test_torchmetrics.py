"""Metrics of torchmetrics see the samples of all replicas, each once, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeflow import Pipeline, PipelineError, UsageError, get_dataloader, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.training import Engine, MetricHook, Trainer

torchmetrics = pytest.importorskip("torchmetrics")

CLASSES, SAMPLES = 5, 38  # the last batch is smaller than the others
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(SAMPLES, CLASSES, generator=GENERATOR)
LABELS = torch.randint(CLASSES, (SAMPLES,), generator=GENERATOR)


class Same(nn.Module):
    """Gives the scores on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, scores: Tensor) -> Tensor:
        return scores * self.scale


def metrics() -> dict[str, Any]:
    """By name, each made anew."""
    options = {"task": "multiclass", "num_classes": CLASSES}
    return {
        "accuracy": torchmetrics.Accuracy(**options),
        "per class": torchmetrics.Accuracy(**options, average="macro"),
        "f1": torchmetrics.F1Score(**options, average="macro"),
        "auroc": torchmetrics.AUROC(**options),  # keeps all scores, as lists
    }


def evaluated(repeats: int) -> list[dict[str, float]]:
    context = current_context()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=2)
    stages = schedule.placement.stages_of(context.pipeline_rank)
    model = Pipeline(nn.ModuleList(Same() for _ in stages), schedule, criterion=nn.CrossEntropyLoss())
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0))
    trainer = Trainer(engine, [MetricHook(name, metric) for name, metric in metrics().items()])
    loader = get_dataloader(TensorDataset(SCORES, LABELS), 8 // context.data_size, shuffle=False, drop_last=False)
    return [dict(trainer.evaluate(loader)) for _ in range(repeats)]


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {}), (4, {"data": 2}), (4, {"tensor": 2})])
def test_every_sample_counts_once(ranks: int, layout: dict[str, Any]) -> None:
    expected = {name: float(metric(SCORES, LABELS)) for name, metric in metrics().items()}
    for first, second in run_threads(evaluated, ranks, 2, **layout):
        assert first == second  # nothing is left of the evaluation before
        first.pop("loss")
        assert first == pytest.approx(expected, abs=1e-6)


def meaned() -> float:
    """A mean with weights, which the labels are."""
    context = current_context()
    schedule = make_schedule("1f1b", ranks=context.pipeline_size, microbatches=2)
    model = Pipeline(Same(), schedule, criterion=nn.MSELoss())
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0))
    trainer = Trainer(engine, [MetricHook("mean", torchmetrics.MeanMetric())])
    weights = LABELS.float()[:, None].expand_as(SCORES).contiguous()
    loader = get_dataloader(TensorDataset(SCORES, weights), 4, shuffle=False, drop_last=False)
    return trainer.evaluate(loader)["mean"]


def test_a_mean_over_replicas() -> None:
    weights = LABELS.float()[:, None]
    expected = float((SCORES * weights).sum() / (weights.sum() * CLASSES))
    for value in run_threads(meaned, 4, data=2):
        assert value == pytest.approx(expected, abs=1e-6)


def several() -> str:
    """Of two replicas, each of which has a metric with a number for every class."""
    schedule = make_schedule("1f1b", ranks=current_context().pipeline_size, microbatches=2)
    model = Pipeline(Same(), schedule, criterion=nn.CrossEntropyLoss())
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, average="none")
    trainer = Trainer(Engine(model, torch.optim.SGD(model.parameters(), lr=0.0)), [MetricHook("accuracy", metric)])
    with pytest.raises((UsageError, PipelineError)) as raised:
        trainer.evaluate([(SCORES, LABELS)])
    return str(raised.value)


def test_a_metric_is_one_number_and_every_rank_is_told() -> None:
    assert all("metric 'accuracy' must be one number" in message for message in run_threads(several, 4, data=2))
