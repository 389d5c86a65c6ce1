"""A whole vision transformer on each grid of tensor ranks, beside one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.parallel.sharding import splits_of
from pipeflow.testing import run_threads
from tests.training.grids import GRIDS
from tests.training.hybrid import Trained, gradient_of, part_of, require_trained
from vit.build import build_pipeline_vit

SIZES: dict[str, Any] = {"img_size": 8, "patch_size": 4, "num_classes": 5, "num_heads": 2, "dim": 16, "dropout": 0.0}


def train(
    name: str, tensor_shape: tuple[int, int, int] | None, reduction: str = "mean", **options: Any
) -> tuple[Trained, Tensor | None]:
    """One step on 16 images, in 2 microbatches; with the outputs."""
    context = current_context()
    schedule = make_schedule(name, ranks=context.pipeline_size, microbatches=2)
    chunks = build_pipeline_vit(4, placement=schedule.placement, dtype=torch.float64, **SIZES, **options)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (16,), generator=generator)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    model = Pipeline(chunks, schedule, criterion=criterion, tensor_shape=tensor_shape, tensor_dtype=torch.float64)
    output = execute_pipeline(iter([(images, labels)]), model, return_outputs=True)
    splits = splits_of(model)
    gradients = {
        name.split(".", 2)[2]: (part_of(parameter, splits, context.tensor_rank), gradient_of(parameter))
        for name, parameter in model.named_parameters()
    }
    outputs = output.outputs
    assert outputs is None or isinstance(outputs, Tensor)
    return Trained([None if output.loss is None else output.loss.item()], [], gradients, {}), outputs


@cache
def expected(**options: Any) -> tuple[Trained, Tensor | None]:
    [found] = run_threads(lambda: train("1f1b", None, **options), 1)
    result: tuple[Trained, Tensor | None] = found
    return result


def run(mode: str, pipeline: int, name: str, **options: Any) -> None:
    whole, outputs = expected(**options)
    results = run_threads(lambda: train(name, (8, 5, 16), **options), GRIDS[mode]["tensor"] * pipeline, **GRIDS[mode])
    require_trained([trained for trained, _ in results], whole, 1e-12)
    assert outputs is not None
    for _, its in results:
        if its is not None:
            torch.testing.assert_close(its, outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.some(3)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("mode", GRIDS)
def test_losses_gradients_and_outputs_are_those_of_one_process(mode: str, name: str) -> None:
    """The shape of activations is promised, as a configuration does: that of whole ones."""
    run(mode, 2, name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["2d", "2.5d"])
def test_a_loss_that_is_a_sum(mode: str) -> None:
    run(mode, 1, "1f1b", reduction="sum")


def evaluate(images: int) -> float | None:
    model = build_pipeline_vit(2, dtype=torch.float64, **SIZES)
    schedule = make_schedule("1f1b", ranks=1, microbatches=2)
    pixels = torch.randn(images, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pipeline = Pipeline(model, schedule, criterion=nn.CrossEntropyLoss(reduction="sum"))
    output = execute_pipeline(iter([(pixels, torch.arange(images) % 5)]), pipeline, forward_only=True)
    return None if output.loss is None else output.loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("images", [7, 8])
def test_the_sum_of_an_evaluation_has_each_sample_once(images: int) -> None:
    """Also if each part of the grid computes all of them."""
    [whole] = run_threads(evaluate, 1, images)
    assert run_threads(evaluate, 8, images, **GRIDS["2.5d"]) == pytest.approx([whole] * 8, abs=1e-12)


@pytest.mark.slow
def test_a_hidden_layer_in_the_head() -> None:
    run("2d", 1, "1f1b", representation_size=8)


def make(**options: Any) -> None:
    with pytest.raises(UsageError, match="Classifier has no form with input_is_parallel=True in tensor mode '3d'"):
        build_pipeline_vit(2, **{**SIZES, **options})


def test_a_hidden_layer_in_the_head_has_no_form_in_a_cube() -> None:
    run_threads(lambda: make(representation_size=8), 8, **GRIDS["3d"])
