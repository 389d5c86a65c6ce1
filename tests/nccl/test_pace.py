"""The host waits for the step before the current one, never for the current one, and a GPU that stands still is an
error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from pipeflow.engine.parallel.transport.channels import abort
from pipeflow.engine.parallel.transport.protocol import LinkError, Work
from pipeflow.engine.runtime.step import Pace
from tests.nccl import device
from tests.nccl.cases import Case


class Moments:
    """A stream whose events record which of them were waited for."""

    def __init__(self) -> None:
        self.recorded = 0
        self.reached: list[int] = []

    def record_event(self) -> Any:
        number, moments, self.recorded = self.recorded, self, self.recorded + 1

        class Event:
            def synchronize(self) -> None:
                moments.reached.append(number)

        return Event()


class World:
    """A world of three ranks whose last one asks for links."""

    rank, size, device = 2, 3, torch.device("cuda", 0)

    def __init__(self) -> None:
        self.is_broken = False

    def link(self, peer: int) -> World:
        assert peer == 0
        return self

    def wait(self, works: Iterable[Work]) -> None:
        if self.is_broken:
            raise RuntimeError("broken")
        for work in works:
            work.wait()

    def lost(self, error: BaseException) -> BaseException:
        return LinkError(0)


def test_a_step_waits_for_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, world = Moments(), World()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: moments)
    pace = Pace(world)  # type: ignore[arg-type]  # the part of a Transport that it uses
    reached = []
    for _ in range(3):
        pace.step()
        reached.append(list(moments.reached))
    assert reached == [[], [0], [0, 1]]
    world.is_broken = True
    with pytest.raises(LinkError, match="waiting for its device"):
        pace.step()
    pace.forget()
    pace.step()
    assert moments.reached == [0, 1]


def test_an_object_of_python_is_not_read_as_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for a step is one: when channels break meanwhile, what lies behind it in memory is no address."""

    def read(address: int) -> int:
        raise AssertionError("read memory of an unknown object")

    monkeypatch.setattr("pipeflow.engine.parallel.transport.channels._read", read)
    assert not abort(World())


def test_training_keeps_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(device._Event, "synchronize", lambda event: waits.append(event.moment))
    Case("1f1b", 2).recorded()
    assert len(waits) == len(set(waits)) > 0
