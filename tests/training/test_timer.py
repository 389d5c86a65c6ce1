"""Timers measure what runs between their ends, on a device too."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pipeflow import UsageError
from pipeflow.training import MultiTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times that the clock will show."""
    times: list[float] = []
    monkeypatch.setattr("pipeflow.training.timer.perf_counter", lambda: times.pop(0))
    return times


def test_what_is_kept_and_what_is_not(clock: list[float]) -> None:
    timer = MultiTimer()
    clock += [1, 3, 10, 11, 20, 27]
    for keep in (True, False, True):
        timer.start("step")
        timer.stop("step", keep_in_history=keep)
    step = timer.get_timer("step")
    assert (step.get_elapsed_time(), step.get_history_sum(), step.get_history_mean()) == (7, 9, 4.5)
    assert list(timer) == [("step", step)]
    timer.reset()
    assert (step.elapsed, step.history, step.get_history_mean()) == (0, [], 0)


def test_names_do_not_mix(clock: list[float]) -> None:
    timer = MultiTimer()
    clock += [0, 1, 3, 7]
    timer.start("outer")
    timer.start("inner")
    assert (timer.stop("inner"), timer.stop("outer")) == (2, 7)
    timer.reset("inner")
    assert [(name, each.elapsed) for name, each in timer] == [("outer", 7), ("inner", 0)]


def test_mistakes_are_told() -> None:
    timer = MultiTimer()
    with pytest.raises(UsageError, match=r"there is no timer 'step': start it first \(existing timers: none\)"):
        timer.stop("step")
    timer.start("step")
    timer.stop("step")
    with pytest.raises(UsageError, match=r"call start\(\) before stop\(\)"):
        timer.stop("step")


def test_switched_off_it_measures_nothing(clock: list[float]) -> None:
    timer = MultiTimer(on=False)
    timer.start("step")
    assert timer.stop("step") is None
    assert list(timer) == []
    assert not clock


@dataclass
class OnDevice:
    device: torch.device


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("meta", 0), ("cuda:1", 2)])
def test_it_waits_for_the_device(device: str, waits: int, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr("pipeflow.training.timer.context_if_launched", lambda: OnDevice(torch.device(device)))
    monkeypatch.setattr("torch.accelerator.synchronize", waited.append)
    clock += [0, 1]
    timer = MultiTimer()
    timer.start("step")
    timer.stop("step")
    assert waited == [torch.device(device)] * waits
