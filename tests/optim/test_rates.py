"""Every schedule is its closed form, over a whole run and past its end."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeflow import UsageError
from pipeflow.optim import (
    CosineAnnealingWarmupLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LinearWarmupLR,
    MultiStepWarmupLR,
    PolynomialWarmupLR,
)

Make = Callable[[Optimizer], LRScheduler]
HALF = math.sqrt(0.5)  # cos(pi / 4)
LOW = math.sqrt(3) / 2  # cos(pi / 6)

# Of T = 10 steps, w = 4 of them a warm-up, at a base rate of 1. Each is held from its last entry on.
QUARTERS = [0.25, 0.5, 0.75, 1.0]
CASES: dict[str, tuple[Make, list[float]]] = {
    "linear": (
        lambda it: LinearWarmupLR(it, total_steps=10, warmup_steps=4),
        [0.2, 0.4, 0.6, 0.8, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0],
    ),
    "linear, no warm-up": (
        lambda it: LinearWarmupLR(it, 10),
        [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0],
    ),
    "cosine": (
        lambda it: CosineAnnealingWarmupLR(it, total_steps=10, warmup_steps=4),
        [*QUARTERS, 1.0, (1 + LOW) / 2, 0.75, 0.5, 0.25, (1 - LOW) / 2, 0.0],
    ),
    "cosine to a tenth": (
        lambda it: CosineAnnealingWarmupLR(it, total_steps=10, warmup_steps=4, eta_min=0.1),
        [*QUARTERS, 1.0, 0.1 + 0.9 * (1 + LOW) / 2, 0.775, 0.55, 0.325, 0.1 + 0.9 * (1 - LOW) / 2, 0.1],
    ),
    "flat": (  # int(10 * 0.72) = 7 steps, then 3 of a cosine
        lambda it: FlatAnnealingLR(it, 10),
        [1.0] * 8 + [0.75, 0.25, 0.0],
    ),
    "flat after a warm-up": (  # int(6 * 0.72) = 4 steps, then 2
        lambda it: FlatAnnealingWarmupLR(it, total_steps=10, warmup_steps=4, eta_min=0.2),
        [*QUARTERS, 1.0, 1.0, 1.0, 1.0, 1.0, 0.6, 0.2],
    ),
    "a third flat": (  # 2 steps, then 4
        lambda it: FlatAnnealingWarmupLR(it, 10, warmup_steps=4, pct_start=0.34),
        [*QUARTERS, 1.0, 1.0, 1.0, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0.0],
    ),
    "flat to the end": (
        lambda it: FlatAnnealingWarmupLR(it, 10, warmup_steps=4, pct_start=1.0),
        [*QUARTERS, 1.0],
    ),
    "polynomial": (
        lambda it: PolynomialWarmupLR(it, 10, 4),
        [*QUARTERS, 1.0, *(0.0001 + 0.9999 * left / 6 for left in (5, 4, 3, 2, 1, 0))],
    ),
    "squares": (
        lambda it: PolynomialWarmupLR(it, total_steps=10, warmup_steps=4, end_lr=0.0, power=2.0),
        [*QUARTERS, 1.0, 25 / 36, 16 / 36, 9 / 36, 4 / 36, 1 / 36, 0.0],
    ),
    "milestones": (
        lambda it: MultiStepWarmupLR(it, total_steps=10, warmup_steps=4, milestones=[6, 8, 12], gamma=0.5),
        [*QUARTERS, 1.0, 1.0, 0.5, 0.5, 0.25],
    ),
}
every_schedule = pytest.mark.parametrize("case", CASES)


def sgd(*rates: Any) -> SGD:
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def advance(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    optimizer.step()
    scheduler.step()


def held(rates: list[float], steps: int) -> list[float]:
    return rates + rates[-1:] * (steps - len(rates))


@every_schedule
def test_the_closed_form_over_a_run_and_past_its_end(case: str) -> None:
    make, expected = CASES[case]
    optimizer = sgd(1.0)
    scheduler = make(optimizer)
    for step, rate in enumerate(held(expected, 25)):
        assert scheduler.last_epoch == step
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=0, abs=1e-12)
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
        advance(optimizer, scheduler)


@pytest.mark.parametrize("case", ["linear", "cosine", "flat", "squares", "milestones"])
def test_each_group_has_a_base_rate_of_its_own(case: str) -> None:
    make, expected = CASES[case]
    optimizer = sgd(1.0, 0.05, torch.tensor(3.0, dtype=torch.float64))
    scheduler = make(optimizer)
    for rate in held(expected, 14):
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        assert rates == pytest.approx([rate, 0.05 * rate, 3 * rate], rel=0, abs=1e-12)
        advance(optimizer, scheduler)


def test_the_end_is_the_same_rate_for_all_groups() -> None:
    optimizer = sgd(1.0, 0.5)
    scheduler = CosineAnnealingWarmupLR(optimizer, 2, eta_min=0.1)
    advance(optimizer, scheduler)
    assert scheduler.get_last_lr() == pytest.approx([0.55, 0.3], rel=0, abs=1e-12)
    advance(optimizer, scheduler)
    assert scheduler.get_last_lr() == [0.1, 0.1]


@every_schedule
@pytest.mark.parametrize("stop", [2, 7, 11])
def test_a_run_goes_on_where_it_was_saved(case: str, stop: int) -> None:
    make, expected = CASES[case]
    optimizer = sgd(1.0, 0.1)
    scheduler = make(optimizer)
    for _ in range(stop):
        advance(optimizer, scheduler)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    again = sgd(7.0, 7.0)
    other = make(again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for step in range(stop, 15):
        rates = [group["lr"] for group in again.param_groups]
        assert rates == [group["lr"] for group in optimizer.param_groups]
        assert rates[0] == pytest.approx(held(expected, 15)[step], rel=0, abs=1e-12)
        advance(optimizer, scheduler)
        advance(again, other)


@every_schedule
def test_it_starts_and_jumps_as_torchs_do(case: str) -> None:
    make, expected = CASES[case]
    optimizer = sgd(1.0)
    scheduler = make(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        for step in (6, 1, 30):
            scheduler.step(step)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(held(expected, 31)[step], rel=0, abs=1e-12)


def test_last_epoch_goes_on_without_a_state() -> None:
    optimizer = sgd(1.0)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    LinearWarmupLR(optimizer, 10, 4, last_epoch=5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(4 / 6, rel=0, abs=1e-12)


@pytest.mark.parametrize("make", [LinearWarmupLR, CosineAnnealingWarmupLR, PolynomialWarmupLR])
@pytest.mark.parametrize("warmup", [3, 5])
def test_training_may_end_within_the_warm_up(make: Any, warmup: int) -> None:
    """Its rate stays as it is at the end of training."""
    optimizer = sgd(1.0)
    scheduler, rates = make(optimizer, 3, warmup), []
    for _ in range(6):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == sorted(rates[:4])
    assert rates[3:] == [rates[3]] * 3
    assert rates[0] == pytest.approx(1 / (warmup + (make is LinearWarmupLR)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda it: LinearWarmupLR(it, 0), "total_steps must be an integer of at least 1, got 0"),
        (lambda it: LinearWarmupLR(it, total_steps=True), "total_steps must be an integer of at least 1, got True"),
        (lambda it: CosineAnnealingWarmupLR(it, 10, -1), "warmup_steps must be an integer of at least 0, got -1"),
        (lambda it: CosineAnnealingWarmupLR(it, 10, eta_min=-0.1), "eta_min must be a rate of at least 0, got -0.1"),
        (lambda it: FlatAnnealingLR(it, 10, 72), "pct_start must be a fraction of the steps, from 0 to 1, got 72"),
        (lambda it: PolynomialWarmupLR(it, 10, end_lr=-1.0), "end_lr must be a rate of at least 0, got -1.0"),
        (lambda it: PolynomialWarmupLR(it, 10, power=0.0), "power must be positive, got 0.0"),
        (lambda it: MultiStepWarmupLR(it, 10), r"milestones must be .* such as \[30, 60\], .* got \(\)"),
        (lambda it: MultiStepWarmupLR(it, 10, 4, [3, 6]), r"none before warmup_steps=4, got \[3, 6\]"),
    ],
)
def test_bad_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(sgd(1.0))
