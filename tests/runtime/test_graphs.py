"""Gradients where the graph has gaps: frozen stages, inputs nobody uses, tensors that want no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, execute_pipeline
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.models import WIDTH, Layer, PlainModel
from tests.runtime.work import Gradients, plain, require_near, schedule_of


class Two(nn.Module):
    """Gives two tensors, of which a later stage may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Layer(0, torch.float64), Layer(1, torch.float64)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(hidden), self.other(hidden)


class Choosing(nn.Module):
    """Uses the second of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(2, torch.float64)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.layer(pair[1])  # type: ignore[no-any-return]


class Forgetting(nn.Module):
    """Its output does not depend on its input's values at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64))

    def forward(self, hidden: Any) -> Tensor:
        tensor = hidden if isinstance(hidden, Tensor) else hidden[0]
        return self.weight.expand(tensor.shape) * 1.5


class Cutting(nn.Module):
    """Its output wants no gradient."""

    def forward(self, hidden: Any) -> Any:
        return tuple(tensor.detach() for tensor in hidden) if isinstance(hidden, tuple) else hidden.detach()


class Turning(nn.Module):
    """Gives a tensor that is not contiguous, and takes a gradient that is not either."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(3, torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden.transpose(-1, 1).transpose(1, -1)).transpose(0, 1)  # type: ignore[no-any-return]


class Back(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(0, 1)


class Repeating(nn.Module):
    """Hands on the same tensor twice, and its input as it came."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        doubled = hidden * 2
        return doubled, doubled, hidden


class Adding(nn.Module):
    def forward(self, three: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return three[0] + 3 * three[1] + 5 * three[2]


class InPlace(nn.Module):
    """Changes its own output in place, after another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(4, torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return (self.layer(hidden) + 1).mul_(0.5).add_(1)  # type: ignore[no-any-return]


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def layer() -> nn.Module:
    return Layer(5, torch.float64)


STAGES: dict[str, Any] = {
    "one of two is not used": lambda: [layer(), Two(), Choosing()],
    "the input is not used": lambda: [layer(), Forgetting(), layer()],
    "neither of two is used": lambda: [Two(), Forgetting(), layer()],
    "the first stage is frozen": lambda: [frozen(layer()), layer(), layer()],
    "the first two stages are frozen": lambda: [frozen(layer()), frozen(layer()), layer()],
    "a middle stage is frozen": lambda: [layer(), frozen(layer()), layer()],
    "the last stage is frozen": lambda: [layer(), layer(), frozen(layer())],
    "the graph is cut": lambda: [layer(), Cutting(), layer()],
    "a pair is cut": lambda: [Two(), Cutting(), Choosing()],
    "nothing is contiguous": lambda: [layer(), Turning(), nn.Sequential(Back(), layer())],
    "a tensor twice": lambda: [layer(), Repeating(), nn.Sequential(Adding(), layer())],
    "in place": lambda: [InPlace(), InPlace(), InPlace()],
}
ALL = tuple(STAGES)


def run_gaps(names: tuple[str, ...]) -> list[Gradients]:
    """Per case, this rank's gradients after two steps without zero_grad, with an evaluation between."""
    rank, batch, told = current_context().pipeline_rank, PlainModel().batch(7), []
    for name in names:
        stage = STAGES[name]()[rank]
        pipeline = Pipeline(stage, schedule_of(("1f1b", 3, 1), 3), criterion=PlainModel().criterion)
        execute_pipeline(iter([batch]), pipeline)
        execute_pipeline(iter([batch]), pipeline, forward_only=True)
        execute_pipeline(iter([batch]), pipeline)
        told.append({name: plain(p.grad) for name, p in stage.named_parameters() if p.grad is not None})
    return told


def require_gaps(names: tuple[str, ...], results: list[list[Gradients]]) -> None:
    values, labels = PlainModel().batch(7)
    for index, name in enumerate(names):
        stages = STAGES[name]()
        (2 * PlainModel().criterion(nn.Sequential(*stages)(values), labels)).backward()
        for rank, stage in enumerate(stages):
            wanted = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
            mine = results[rank][index]
            assert all(not mine[extra].any() for extra in mine.keys() - wanted.keys())
            assert wanted.keys() <= mine.keys()
            require_near({name: mine[name] for name in wanted}, wanted)


@pytest.mark.parametrize("name", ALL)
def test_threads(name: str) -> None:
    require_gaps((name,), run_threads(run_gaps, 3, (name,)))


@pytest.mark.exhaustive
def test_gloo() -> None:
    require_gaps(ALL, run_processes(run_gaps, 3, ALL))
