"""What a pipeline says of split backwards, and what it leaves in `.grad` when."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from pipeflow import Pipeline, PipelineError, Schedule, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.testing.models import WIDTH, PlainModel
from tests.runtime.work import build, schedule_of
from tests.tensor.ranks import seeded

MODEL = PlainModel(4)


def run(name: str) -> dict[int, str]:
    return {stage: str(deferral) for stage, deferral in build(MODEL, schedule_of((name, 2, 1), 4)).deferrals.items()}


def test_what_comes_with_the_inputs_gradient_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pipeflow"):
        run_threads(run, 2, "1f1b")
        assert not caplog.records
        first, second = run_threads(run, 2, "zb-v")
    assert (sorted(first), sorted(second)) == ([0, 3], [1, 2])
    deferred, whole = WIDTH * WIDTH + WIDTH, WIDTH * WIDTH + 2 * WIDTH
    assert first[0] == (
        f"{deferred} of {whole} elements of weight gradients are deferred (2 parameters); not deferred: layers.0.scale"
    )
    assert sorted(record.getMessage() for record in caplog.records) == sorted(
        f"stage {stage}: {text}" for stage, text in {**first, **second}.items()
    )


def run_watching() -> list[tuple[bool, bool]]:
    """Whether a deferred and another parameter have a gradient when each F begins, and at the end, under a schedule
    that leaves the first W until after the second F.
    """
    schedule = Schedule.from_csv("0F0,0I0,0F1,0W0,0I1,0W1")
    pipeline = build(MODEL, schedule)
    layer: Any = pipeline.get_submodule("chunks.0.layers.0")
    seen: list[tuple[bool, bool]] = []

    def look(*_: object) -> None:
        seen.append((layer.linear.weight.grad is not None, layer.scale.grad is not None))

    layer.register_forward_hook(look)
    execute_pipeline(iter([MODEL.batch(4)]), pipeline)
    look()
    return seen


def test_deferred_gradients_come_in_w_and_others_in_i() -> None:
    assert run_threads(run_watching, 1) == [[(False, False), (False, True), (True, True)]]


def run_mixed() -> list[bool]:
    """Whether a checkpointed layer may defer, in forwards and in backwards, of which that of microbatch 1 alone is
    split.
    """
    seen: list[bool] = []
    linear: Any = nn.Linear(6, 6, dtype=torch.float64)
    linear.register_forward_pre_hook(lambda *_: seen.append(linear.deferral.active))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, value: Tensor) -> Tensor:
            output: Tensor = checkpoint(self.linear, value, use_reentrant=False)
            return output

    schedule = Schedule.from_csv("0F0,0F1,0B0,0I1,0W1")
    execute_pipeline(iter([batch_of(2)]), Pipeline(Checkpointed(), schedule, criterion=nn.functional.mse_loss))
    return seen


def test_layers_defer_in_microbatches_whose_backward_is_split_also_where_they_are_called_again() -> None:
    assert run_threads(run_mixed, 1) == [[False, True, False, True]]


def hooks_of(module: nn.Module, seen: Counter[str]) -> Sequence[object]:
    """Hooks of every kind, which count their calls; and nodes, which must live as long as their hooks."""
    weight, bias = module.get_parameter("0.weight"), module.get_parameter("0.bias")
    nodes = [get_gradient_edge(each).node for each in (weight, bias)]
    nodes[0].register_prehook(lambda gradients: (seen.update(["prehook"]), (2 * gradients[0],))[1])
    nodes[1].register_hook(lambda *_: seen.update(["node"]))
    weight = module.get_parameter("1.weight")
    weight.register_hook(lambda gradient: (seen.update(["tensor"]), 3 * gradient)[1])
    weight.register_post_accumulate_grad_hook(lambda _: seen.update(["added"]))
    register_multi_grad_hook(
        [module.get_parameter(f"{layer}.bias") for layer in (0, 1)], lambda _: seen.update(["several"])
    )
    return nodes


def two_losses(stage: nn.Sequential) -> Callable[[Tensor, Tensor], Tensor]:
    """A criterion that weighs two losses by their gradients at the last layer's weight, as VQGAN's does."""

    last = stage.get_parameter("2.weight")

    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        losses = [nn.functional.mse_loss(output, labels), output.abs().mean()]
        slopes = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in losses]
        weighed: Tensor = losses[0] + slopes[0] / slopes[1] * losses[1]
        return weighed

    return criterion


def stage_of(index: int) -> nn.Sequential:
    stage: nn.Sequential = seeded(
        lambda: nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))), seed=index
    )
    return stage


def batch_of(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(2, 3 * microbatches, 6, generator=generator, dtype=torch.float64)
    return inputs, labels


def run_seen(name: str) -> tuple[dict[str, Tensor], Counter[str]]:
    rank, seen = current_context().pipeline_rank, Counter[str]()
    stage = stage_of(rank)
    nodes = hooks_of(stage, seen)
    pipeline = Pipeline(stage, make_schedule(name, ranks=2, microbatches=3), criterion=two_losses(stage), weigh=len)
    execute_pipeline(iter([batch_of(3)]), pipeline)
    assert nodes
    return {name: each.grad for name, each in stage.named_parameters() if each.grad is not None}, seen


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_hooks_and_a_criterion_that_differentiates_see_what_plain_torch_shows(name: str) -> None:
    stages, seen = [stage_of(rank) for rank in range(2)], [Counter[str]() for _ in range(2)]
    nodes = [hooks_of(*each) for each in zip(stages, seen, strict=True)]
    criterion = two_losses(stages[1])
    for inputs, labels in zip(*(each.chunk(3) for each in batch_of(3)), strict=True):
        (criterion(stages[1](stages[0](inputs)), labels) / 3).backward()
    assert nodes
    for stage, expected, (gradients, found) in zip(stages, seen, run_threads(run_seen, 2, name), strict=True):
        assert found == expected
        assert found.keys() == {"prehook", "node", "tensor", "added", "several"}
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, stage.get_parameter(parameter).grad)


def run_penalty(name: str, fuses: bool = False) -> str:
    """A criterion that differentiates a gradient: what each rank raises."""
    rank, last = current_context().pipeline_rank, stage_of(1)

    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        [slope] = torch.autograd.grad(last(output).sum(), output, create_graph=True)
        return nn.functional.mse_loss(output, labels) + slope.square().sum()

    stages = [stage_of(0), nn.Sequential(last)]
    schedule = make_schedule(name, ranks=2, microbatches=2)
    pipeline = Pipeline(stages[rank], schedule, criterion=criterion, weigh=len, gradient_accumulation_fusion=fuses)
    last.train()
    try:
        execute_pipeline(iter([batch_of(2)]), pipeline)
    except (UsageError, PipelineError) as error:
        return str(error)
    return ""


def test_a_gradient_that_is_differentiated_works_without_w_and_is_refused_with_it() -> None:
    assert run_threads(run_penalty, 2, "1f1b") == ["", ""]
    for told in (*run_threads(run_penalty, 2, "zb-h1"), *run_threads(run_penalty, 2, "1f1b", True)):
        assert "create_graph=True cannot run through a layer that defers its weight gradient" in told
        assert "use a schedule without W, such as 1f1b, and no gradient_accumulation_fusion" in told
