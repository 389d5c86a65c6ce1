"""What a script does to the module that it gave to from_module, beside the Pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.testing import run_threads


class Block(nn.Module):
    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(4))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.linear(x) + self.shift)
        made: Tensor = self.drop(hidden * self.scale).tanh()
        return made


def made() -> tuple[nn.Module, Pipeline, Callable[..., float]]:
    """A module, its Pipeline, and the loss of a batch, in which both agree."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Block() for _ in range(4)))
    batch = torch.randn(8, 4), torch.randn(8, 4)
    schedule = make_schedule("interleaved-1f1b", ranks=1, microbatches=1, chunks=2)
    model = Pipeline.from_module(module, schedule, batch, criterion=nn.MSELoss())

    def step(**options: Any) -> float:
        torch.manual_seed(1)
        found = execute_pipeline(iter([batch]), model, **options).loss
        assert found is not None
        torch.manual_seed(1)
        with torch.no_grad():
            assert float(found) == pytest.approx(float(nn.functional.mse_loss(module(batch[0]), batch[1])), abs=1e-6)
        return float(found)

    return module, model, step


def test_modes_are_those_of_the_module_and_of_the_pipeline() -> None:
    """The last call counts, of either, and of a layer's."""

    def rank() -> None:
        module, model, step = made()
        trained = step()
        module.eval()
        evaluated = step(forward_only=True)
        assert evaluated != trained
        assert step(forward_only=True) == evaluated
        model.train()
        assert module.training
        step()
        module.get_submodule("1.norm").eval()
        step(forward_only=True)
        model.eval()
        step(forward_only=True)
        module.train()
        step()

    run_threads(rank, 1)


def change_values(module: Any) -> None:
    module[1].shift.fill_(1)
    module[2].requires_grad_(False)
    module[0].linear.weight.data.mul_(2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "1.shift": lambda module: setattr(module[1], "shift", torch.ones(4)),
    "3.drop.p": lambda module: setattr(module[3].drop, "p", 0.0),
    "0.scale": lambda module: setattr(module[0], "scale", 2.0),
    "0.linear._forward_hooks": lambda module: module[0].linear.register_forward_hook(lambda *_: None),
    "2.linear.weight": lambda module: setattr(module[2].linear, "weight", nn.Parameter(torch.eye(4))),
    "2.norm": lambda module: setattr(module[2], "norm", nn.Identity()),
    "": lambda module: (
        module[1].shift.fill_(1),
        module[2].requires_grad_(False),
        module[0].linear.weight.data.mul_(2),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_stages_do_not_see_are_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Values in place are shared, and told nothing of."""

    def rank() -> None:
        module, model, _ = made()
        for turn in range(3):
            if turn == 1:
                CHANGES[name](module)
            batch = torch.randn(8, 4), torch.randn(8, 4)
            execute_pipeline(iter([batch]), model, forward_only=True)

    run_threads(rank, 1)
    told = [each.getMessage() for each in caplog.records if "after from_module" in each.getMessage()]
    assert [each.split(" of the module")[0] for each in told] == [name] * bool(name)


def test_modes_that_change_between_steps_of_a_training_are_given_when_asked() -> None:
    """A callback of a trainer may freeze the statistics of a layer at any moment."""

    def rank() -> None:
        module, model, step = made()
        step()
        step()
        module.get_submodule("1.norm").eval()
        module.get_submodule("2.drop").eval()
        assert model.runner.original is not None
        model.runner.original.give_modes()
        step()

    run_threads(rank, 1)
