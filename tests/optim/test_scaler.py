"""The loss scale grows when all is well and shrinks when overflows come often."""

from __future__ import annotations

from typing import Any

import pytest

from pipeflow import UsageError
from pipeflow.optim import LossScaler


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step, of which those marked x overflow."""
    told = []
    for mark in overflows:
        scaler.update(overflow=mark == "x")
        told.append(scaler.scale)
    return told


def test_it_shrinks_from_the_second_overflow_on_until_it_has_grown() -> None:
    scaler = LossScaler(initial_scale=16, growth_interval=3)
    assert scales(scaler, "x.xx") == [16, 16, 8, 4]
    assert scales(scaler, "..x") == [4, 4, 2]  # the run of clean steps starts anew
    assert scales(scaler, "...xx") == [2, 2, 4, 4, 2]


def test_it_grows_again_only_after_as_many_steps() -> None:
    assert scales(LossScaler(initial_scale=1, growth_interval=2), "......") == [1, 2, 2, 4, 4, 8]


def test_it_stays_within_its_bounds() -> None:
    scaler = LossScaler(initial_scale=2, growth_interval=1, hysteresis=1, min_scale=1, max_scale=4)
    assert scales(scaler, "....") == [4, 4, 4, 4]
    assert scales(scaler, "xxxx") == [2, 1, 1, 1]


def test_defaults() -> None:
    scaler = LossScaler()
    assert scales(scaler, "." * 1000)[-2:] == [2.0**16, 2.0**17]


def test_it_goes_on_from_its_state() -> None:
    first, second = LossScaler(growth_interval=4), LossScaler(growth_interval=4)
    scales(first, "..x..")
    second.load_state_dict(first.state_dict())
    assert scales(first, "..xx.") == scales(second, "..xx.")


@pytest.mark.parametrize(
    "options",
    [
        {"initial_scale": 0.5},
        {"backoff_factor": 1},
        {"growth_factor": 1},
        {"hysteresis": 0},
        {"growth_interval": 0},
        {"min_scale": 0},
    ],
    ids=str,
)
def test_numbers_without_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        LossScaler(**options)
