"""Copies to the host on a GPU that is only pretended: the memory that they read is kept until computations wait."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pipeflow import Action, Kind
from pipeflow.engine.runtime.program.memory_actions import MemoryCopy
from tests.nccl.device import DEVICE, _Event, _Stream, pretended


def copies(kinds: str) -> list[MemoryCopy]:
    """Operations of a rank that read one tensor each."""
    sources: deque[MemoryCopy] = deque()
    thread = ThreadPoolExecutor(1)
    return [
        MemoryCopy(Action(Kind(kind), 0, number), lambda _: [torch.ones(1)], DEVICE, thread, sources)
        for number, kind in enumerate(kinds)
    ]


def held(operations: list[MemoryCopy]) -> list[int]:
    return [len(each.held) for each in operations]


def test_an_offload_keeps_its_memory_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(_Event, "query", lambda _: False)
    monkeypatch.setattr(_Stream, "wait_event", lambda _, event: waited.append(event))
    first, second, load = operations = copies("OOL")
    with pretended():
        first.start()
        assert (held(operations), waited) == ([1, 0, 0], [])
        second.start()
        assert (held(operations), len(waited)) == ([0, 1, 0], 1)
        load.after = [second]
        load.start()
        assert (held(operations), len(waited)) == ([0, 1, 1], 2)  # the load alone waits for the offload
        for operation in operations:  # as at the end of the step
            operation.end()
        assert held(operations) == [0, 0, 0]
        assert len(waited) == 4


def test_an_offload_that_has_ended_is_freed_by_any_copy() -> None:
    offload, load = operations = copies("OL")
    with pretended():
        offload.start()
        load.start()
    assert held(operations) == [0, 1]
