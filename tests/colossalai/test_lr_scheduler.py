"""The schedules that torch has are torch's, called as ColossalAI calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from pipeflow.colossalai.nn import lr_scheduler as there
from pipeflow.optim import PolynomialWarmupLR


def rates(make: Callable[[SGD], LRScheduler]) -> list[list[Any]]:
    """Of two groups, over 8 steps and past them."""
    optimizer = SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1.0, 0.1)], momentum=0.9)
    scheduler, found = make(optimizer), []
    for _ in range(7):
        found.append(scheduler.get_last_lr())
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (
            lambda it: there.CosineAnnealingLR(it, total_steps=8, eta_min=0.01),
            lambda it: lr_scheduler.CosineAnnealingLR(it, 8, eta_min=0.01),
        ),
        (
            lambda it: there.PolynomialLR(it, total_steps=8, end_lr=0.01, power=2.0),
            lambda it: PolynomialWarmupLR(it, 8, end_lr=0.01, power=2.0),
        ),
        (lambda it: there.PolynomialLR(it, 8, end_lr=0.0), lambda it: lr_scheduler.PolynomialLR(it, 8, power=1.0)),
        (
            lambda it: there.OneCycleLR(it, total_steps=8, pct_start=0.5),
            lambda it: lr_scheduler.OneCycleLR(it, [1.0, 0.1], total_steps=8, pct_start=0.5),
        ),
        (
            lambda it: there.MultiStepLR(it, total_steps=8, milestones=[3, 5], gamma=0.5),
            lambda it: lr_scheduler.MultiStepLR(it, [3, 5], gamma=0.5),
        ),
        (
            lambda it: there.StepLR(it, total_steps=8, step_size=3, gamma=0.5),
            lambda it: lr_scheduler.StepLR(it, 3, gamma=0.5),
        ),
        (
            lambda it: there.ExponentialLR(it, total_steps=8, gamma=0.9),
            lambda it: lr_scheduler.ExponentialLR(it, 0.9),
        ),
        (
            lambda it: there.LambdaLR(it, total_steps=8, lr_lambda=lambda step: 1 / (1 + step)),
            lambda it: lr_scheduler.LambdaLR(it, lambda step: 1 / (1 + step)),
        ),
        (
            lambda it: there.MultiplicativeLR(it, total_steps=8, lr_lambda=lambda _: 0.5),
            lambda it: lr_scheduler.MultiplicativeLR(it, lambda _: 0.5),
        ),
    ],
)
def test_what_torch_has_is_torchs(ours: Callable[[SGD], LRScheduler], torchs: Callable[[SGD], LRScheduler]) -> None:
    assert rates(ours) == [pytest.approx(step, rel=0, abs=1e-12) for step in rates(torchs)]
