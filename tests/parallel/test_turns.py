"""Two calls in turns: one runs at a time, and their order depends on nothing but where they pass the turn on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipeflow.engine.parallel.turns import Turns


def ran(*steps: list[float], fails: tuple[int, int] | None = None) -> list[str]:
    """What two calls do, one after the other: "a0", "b0", "a1" ... Each takes the time of each of its steps, and passes
    the turn on between them. `fails` is the call that fails, and its step.
    """
    turns, told, inside = Turns(), list[str](), [0]

    def call(which: int) -> Callable[[], None]:
        def run() -> None:
            for number, seconds in enumerate(steps[which]):
                if number:
                    turns.pass_on()
                inside[0] += 1
                assert inside == [1]
                time.sleep(seconds)
                told.append(f"{'ab'[which]}{number}")
                inside[0] -= 1
                if fails == (which, number):
                    raise ZeroDivisionError(which)

        return run

    with ThreadPoolExecutor(1) as thread:
        try:
            turns.both(call(0), call(1), thread.submit)
        except ZeroDivisionError:
            told.append("error")
        turns.pass_on()  # to nobody
    return told


@pytest.mark.parametrize("seconds", [0, 0.001])
def test_turns_alternate_whatever_steps_take(seconds: float) -> None:
    assert ran([seconds] * 3, [0] * 3) == ran([0] * 3, [seconds] * 3) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_call_goes_on_alone_after_the_other() -> None:
    assert ran([0] * 4, [0]) == ["a0", "b0", "a1", "a2", "a3"]
    assert ran([0], [0] * 3) == ["a0", "b0", "b1", "b2"]


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ((0, 0), ["a0", "error"]),
        ((0, 1), ["a0", "b0", "a1", "error"]),
        ((1, 0), ["a0", "b0", "error"]),
        ((1, 1), ["a0", "b0", "a1", "b1", "error"]),
    ],
)
def test_a_failure_ends_the_other_at_its_next_turn(fails: tuple[int, int], told: list[str]) -> None:
    assert ran([0] * 3, [0] * 3, fails=fails) == told


def test_each_call_has_random_numbers_of_its_own() -> None:
    """The first sets the generator back, as a recomputation does, while the second draws."""
    turns, drawn, generator = Turns(), list[float](), torch.Generator().manual_seed(1)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1)).tolist()

    def recompute() -> None:
        before = generator.get_state()
        generator.manual_seed(7)
        first = torch.rand(1, generator=generator).item()
        turns.pass_on()
        second = torch.rand(1, generator=generator).item()
        assert [first, second] == torch.rand(2, generator=torch.Generator().manual_seed(7)).tolist()
        turns.pass_on()
        generator.set_state(before)

    def draw() -> None:
        for _ in range(2):
            drawn.append(torch.rand(1, generator=generator).item())
            turns.pass_on()

    with ThreadPoolExecutor(1) as thread:
        turns.both(recompute, draw, thread.submit, [generator])
    assert [*drawn, torch.rand(1, generator=generator).item()] == expected
