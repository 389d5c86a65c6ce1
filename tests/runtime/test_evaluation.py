"""Evaluating between two training steps changes nothing but the outputs it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipeflow import Pipeline, execute_pipeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import WIDTH, KeywordModel, PlainModel, TiedModel, TinyModel, TreeModel
from tests.runtime.work import build, each_once, gradients_of, plain, schedule_of, variants

Variant = tuple[str, int, int]


def run_evaluation(model: TinyModel, variant: Variant, options: dict[str, Any]) -> Any:
    """Two steps with an evaluation between them; and the same without."""
    pipeline = build(model, schedule_of(variant, 3), **options)
    first, second, other = (model.batch(6, seed=seed) for seed in range(3))
    execute_pipeline(iter([first]), pipeline)
    before = gradients_of(pipeline)
    held = [parameter.grad for parameter in pipeline.parameters()]
    output = execute_pipeline(iter([other]), pipeline, forward_only=True, return_outputs=True)
    for parameter, gradient in zip(pipeline.parameters(), held, strict=True):
        assert parameter.grad is gradient
    require_same(before, gradients_of(pipeline))
    for leaf in tree_leaves(output.outputs):
        assert leaf is None or not leaf.requires_grad
    execute_pipeline(iter([second]), pipeline)
    after = gradients_of(pipeline)
    pipeline.zero_grad()
    for batch in (first, second):
        execute_pipeline(iter([batch]), pipeline)
    require_same(after, gradients_of(pipeline))
    return None if output.loss is None else output.loss.item(), plain(output.outputs)


def require_same(gradients: dict[str, Any], others: dict[str, Any]) -> None:
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert gradient.tobytes() == others[name].tobytes()


def require_evaluated(model: TinyModel, results: list[Any]) -> None:
    inputs, labels = model.batch(6, seed=2)
    module = model.stage(0, model.layers)
    with torch.no_grad():
        output = module(**inputs) if isinstance(inputs, dict) else module(inputs)
        loss = model.criterion(output, labels)
    told = [(loss, outputs) for loss, outputs in results if loss is not None]
    assert len(told) in (1, 2)  # two ranks have the last stage of a bidirectional schedule
    for its_loss, outputs in told:
        assert its_loss == pytest.approx(loss.item(), rel=1e-12)
        for mine, its in zip(tree_leaves(outputs), tree_leaves(plain(output)), strict=True):
            assert abs(mine - its).max() <= 1e-14


@pytest.mark.some(19)
@pytest.mark.parametrize("variant", each_once(variants(max_ranks=3, max_chunks=2)))
@pytest.mark.parametrize("model", [TiedModel(6), KeywordModel(6), TreeModel(6)], ids=str)
def test_threads(model: TinyModel, variant: Variant) -> None:
    require_evaluated(model, run_threads(run_evaluation, variant[1], model, variant, {}))


@pytest.mark.parametrize("variant", [("1f1b", 3, 1), ("interleaved-1f1b", 2, 2)], ids=str)
def test_threads_with_the_shape_known(variant: Variant) -> None:
    options = {"tensor_shape": (2, 3, WIDTH), "tensor_dtype": torch.float64}
    require_evaluated(PlainModel(), run_threads(run_evaluation, variant[1], PlainModel(), variant, options))


@pytest.mark.exhaustive
def test_gloo() -> None:
    for variant in (("1f1b", 2, 1), ("interleaved-1f1b", 2, 2)):
        require_evaluated(TiedModel(), run_processes(run_evaluation, 2, TiedModel(), variant, {}))


def run_without_labels() -> Any:
    model, schedule = PlainModel(), schedule_of(("1f1b", 2, 1), 2)
    pipeline = Pipeline(model.chunks(schedule, current_context().pipeline_rank), schedule)
    inputs, _ = model.batch(4)
    output = execute_pipeline(iter([(inputs, None)]), pipeline, forward_only=True, return_outputs=True)
    assert output.loss is None
    return plain(output.outputs)


def test_without_labels_and_criterion_there_are_outputs_alone() -> None:
    model = PlainModel()
    _, outputs = run_threads(run_without_labels, 2)
    assert abs(outputs - plain(model.stage(0, 4)(model.batch(4)[0]))).max() <= 1e-14


class Normalizing(nn.Module):
    """Counts the batches it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def forward(self, hidden: Any) -> Any:
        return self.norm(hidden.flatten(0, 1)).view_as(hidden)


def run_counting() -> int:
    schedule = schedule_of(("1f1b", 2, 1), 4)
    pipeline = Pipeline(Normalizing(), schedule, criterion=PlainModel().criterion)
    batch = PlainModel().batch(8)
    execute_pipeline(iter([batch]), pipeline)
    pipeline.eval()
    execute_pipeline(iter([batch]), pipeline, forward_only=True)
    pipeline.train()
    execute_pipeline(iter([batch]), pipeline)
    [norm] = [module for module in pipeline.modules() if isinstance(module, nn.BatchNorm1d)]
    assert norm.num_batches_tracked is not None
    return int(norm.num_batches_tracked)


def test_a_module_runs_once_per_microbatch() -> None:
    assert run_threads(run_counting, 2) == [8, 8]
