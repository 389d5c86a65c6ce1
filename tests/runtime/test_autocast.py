"""torch.autocast covers stages and criterion, and no backward: as an argument of a Pipeline, and around a step."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import ColumnParallelLinear
from pipeflow.testing import run_threads
from pipeflow.testing.models import Layer, PlainModel
from pipeflow.training import Engine
from tests.runtime.work import gradients_of

MODEL = PlainModel(dtype=torch.float32)
BFLOAT16 = torch.bfloat16


class Precise(nn.Module):
    """A layer that leaves autocast in its forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.layer(hidden.float())


def train(name: str, how: str, precise: bool) -> Any:
    """The loss and the gradients of a step, with autocast around it, as an argument, or without it."""
    rank, ranks = current_context().pipeline_rank, current_context().pipeline_size
    schedule = make_schedule(name, ranks=ranks, microbatches=4)
    layers = [Layer(2 * rank + index, torch.float32) for index in range(2)]
    chunk = nn.Sequential(*(Precise(layer) if precise else layer for layer in layers))
    autocast = BFLOAT16 if how == "argument" else None
    pipeline = Pipeline(chunk, schedule, criterion=functional.mse_loss, autocast=autocast)
    with torch.autocast("cpu", BFLOAT16) if how == "around" else nullcontext():
        loss = execute_pipeline(iter([MODEL.batch(8)]), pipeline, broadcast_loss=True).loss
        assert torch.is_autocast_enabled("cpu") == (how == "around")
    return loss, gradients_of(pipeline)


def require_same(found: Any, expected: Any) -> None:
    for (loss, gradients), (wanted_loss, wanted) in zip(found, expected, strict=True):
        assert loss == wanted_loss
        assert {name: each.tolist() for name, each in gradients.items()} == {
            name: each.tolist() for name, each in wanted.items()
        }


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_autocast_around_a_step_is_that_of_its_forwards(name: str) -> None:
    expected = run_threads(train, 2, name, "argument", False)
    require_same(run_threads(train, 2, name, "around", False), expected)
    assert run_threads(train, 2, name, "without", False)[0][0] != expected[0][0]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_backwards_run_outside_of_autocast(name: str) -> None:
    expected = run_threads(train, 2, name, "without", True)
    require_same(run_threads(train, 2, name, "around", True), expected)


def by_hand(around: bool) -> dict[str, Any]:
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    pipeline = Pipeline(Precise(Layer(0, torch.float32)), schedule)
    engine = Engine(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1))
    inputs, labels = MODEL.batch(8)
    with torch.autocast("cpu", BFLOAT16) if around else nullcontext():
        engine.backward(functional.mse_loss(pipeline.chunks[0](inputs), labels))
    return {name: each.tolist() for name, each in gradients_of(pipeline).items()}


def test_a_backward_by_hand_runs_outside_of_autocast() -> None:
    assert run_threads(by_hand, 1, True) == run_threads(by_hand, 1, False)


class Conversions(TorchDispatchMode):
    """Counts conversions of the weights of `module`, by the weight."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.names = {parameter.data_ptr(): name for name, parameter in module.named_parameters()}
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.names:
            self.found[self.names[args[0].data_ptr()]] += 1
        return func(*args, **(kwargs or {}))


def conversions(name: str, training: bool) -> list[int]:
    schedule = make_schedule(name, ranks=1, microbatches=8)
    first = nn.Linear(8, 8)
    chunk = nn.Sequential(first, nn.Linear(8, 8), ColumnParallelLinear(8, 8))
    pipeline = Pipeline(chunk, schedule, criterion=functional.mse_loss, autocast=BFLOAT16)
    batch = torch.randn(16, 8), torch.randn(16, 8)
    counted = []
    for _ in range(2):
        with Conversions(chunk) as counting:
            execute_pipeline(iter([batch]), pipeline, forward_only=not training)
        assert len(counting.found) == len(list(chunk.parameters()))
        counted += counting.found.values()
        with torch.no_grad():
            first.weight += 1  # the next step must see it
    return counted


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_microbatches_share_the_converted_weights_of_a_step(name: str, training: bool) -> None:
    [counted] = run_threads(conversions, 1, name, training)
    assert set(counted) == {1}


def fail_then_call() -> bool:
    """Whether a layer computes with its current weights after a step that failed."""
    context, layer = current_context(), nn.Linear(3, 3)
    schedule = make_schedule("zb-h1", ranks=context.pipeline_size, microbatches=2)
    pipeline = Pipeline(layer, schedule, criterion=functional.mse_loss, autocast=BFLOAT16)
    inputs, labels = torch.ones(2, 3), torch.full((2, 3), float(context.rank))
    with pytest.raises(UsageError, match="read another batch"):
        execute_pipeline(iter([(inputs, labels)]), pipeline)
    with torch.no_grad():
        layer.weight.zero_()
    with torch.autocast("cpu", BFLOAT16):
        assert layer.bias is not None
        return torch.equal(pipeline.chunks[0](inputs), layer.bias.to(BFLOAT16).expand(2, 3))


def test_a_step_that_fails_leaves_no_converted_weights() -> None:
    assert run_threads(fail_then_call, 2) == [True, True]
