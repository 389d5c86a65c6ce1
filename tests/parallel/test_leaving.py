"""A rank whose script ends while others need it is named by every other rank, soon, whoever leaves and however."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.control.coordinator import Coordinator
from pipeflow.engine.parallel.control.monitor import Monitor
from pipeflow.engine.parallel.control.rescue import aside
from pipeflow.engine.parallel.transport.protocol import LinkError
from tests.parallel.leaving import WAYS

TIMEOUT, SOON = 2.0, 5.0  # seconds
SECRET = b"s" * 32
ROOT = Path(__file__).parents[2]


def play(ranks: int, leavers: tuple[int, ...], rounds: int, folder: Path) -> None:
    """Checks every round: all processes end, and all that stayed name a rank that has left, within the timeout."""
    listed = ",".join(map(str, leavers))
    command = [
        sys.executable,
        "-m",
        "tests.parallel.leaving",
        str(folder),
        str(ranks),
        listed,
        str(rounds),
        f"{TIMEOUT}",
    ]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    output = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    begun = [
        result for result in map(json.loads, output.stdout.splitlines()) if "not begun" not in str(result["notes"])
    ]
    assert len(begun) == rounds, output.stderr
    for result in begun:
        assert result["stacks"] == []
        left = min(note["left"] for rank, note in enumerate(result["notes"]) if rank in leavers)
        for rank, note in enumerate(result["notes"]):
            assert result["codes"][rank] == (result["how"] == "exception" and rank in leavers)
            if rank not in leavers:
                assert note["died"] in leavers, note["message"]
                assert note["told"] - max(note["began"], left) < TIMEOUT, result["how"]


@pytest.mark.parametrize(("ranks", "leavers"), [(3, (1,)), (4, (0, 1, 2))])
@pytest.mark.exhaustive
def test_every_rank_names_one_that_has_left(ranks: int, leavers: tuple[int, ...], tmp_path: Path) -> None:
    play(ranks, leavers, len(WAYS), tmp_path)


ORDERS = [
    *((2, leavers) for leavers in [(0,), (1,)]),
    *((3, leavers) for leavers in [(0,), (1,), (2,), (0, 1), (2, 1)]),
    *((4, leavers) for leavers in [(0,), (2,), (3,), (0, 1, 2), (3, 2, 1)]),
]


@pytest.mark.parametrize(("ranks", "leavers"), ORDERS)
@pytest.mark.slow
@pytest.mark.drill
def test_every_rank_names_one_that_has_left_a_hundred_times(
    ranks: int, leavers: tuple[int, ...], tmp_path: Path
) -> None:
    play(ranks, leavers, 100, tmp_path)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    """A coordinator of two ranks that hears everything, and answers nothing that it has to think about."""

    async def think(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Coordinator, "_investigate", think)
    return Coordinator("127.0.0.1", 2, SECRET, 0.5)


def monitor_of(coordinator: Coordinator, timeout: float) -> Monitor:
    return Monitor("127.0.0.1", coordinator.port, rank=1, size=2, secret=SECRET, timeout=timeout)


ASKS: dict[str, Callable[[Monitor], object]] = {
    "report": lambda monitor: monitor.report(0, LinkError(0)),
    "open": lambda monitor: monitor.open(0),
    "get": lambda monitor: monitor.get("key"),
}


@pytest.mark.parametrize("asks", ASKS)
def test_who_waits_for_the_coordinator_goes_on_when_it_ends(deaf: Coordinator, asks: str) -> None:
    monitor = monitor_of(deaf, 2 * SOON)
    asking = aside(lambda: ASKS[asks](monitor), "asking")
    time.sleep(0.2)
    deaf.close()
    if asks == "report":
        told = asking.result(SOON)
        assert isinstance(told, Failure)
        assert (told.rank, told.died) == (0, 0)
        assert "it has left" in told.reason
    else:
        with pytest.raises(LinkError):
            asking.result(SOON)
        assert monitor.report(0, LinkError(0)).died == 0
    monitor.close()


def test_a_coordinator_that_talks_but_does_not_answer_is_named(deaf: Coordinator) -> None:
    """Such as one that is stopped after it has asked all ranks."""
    monitor = monitor_of(deaf, TIMEOUT)
    asking = aside(lambda: monitor.report(0, LinkError(0)), "asking")
    for number in range(30):
        deaf._loop.call_soon_threadsafe(deaf._broadcast, {"op": "ask", "round": number})
        time.sleep(0.05)
    told = asking.result(SOON)
    assert (told.rank, told.died) == (0, None)
    assert "it does not answer" in told.reason
    monitor.close()
    deaf.close()
