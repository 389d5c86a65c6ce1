"""A batch in host memory is copied to a GPU, which is only pretended here, on a stream beside the computations."""

from __future__ import annotations

import pytest
import torch

from pipeflow.engine.runtime.devices import copied
from tests.nccl.device import DEVICE, OnDevice, Watch, _Stream, is_beside, pretended


def test_a_copy_from_the_host_is_beside_the_computations_which_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[str] = []
    monkeypatch.setattr(_Stream, "wait_stream", lambda *_: issued.append("awaited"))
    monkeypatch.setattr(OnDevice, "record_stream", lambda *_: issued.append("in use"))
    with pretended(), Watch(lambda: issued.append("beside" if is_beside() else "amid"), issued.append):
        made = copied(torch.arange(3.0), DEVICE)
        assert issued == ["beside", "awaited", "in use"]  # and the host waits for nothing
        assert made.device == DEVICE
        assert made.tolist() == [0, 1, 2]


def test_what_is_on_the_gpu_is_not_copied_beside_and_a_copy_to_the_host_is_complete() -> None:
    beside: list[bool] = []
    waits: list[str] = []
    with pretended(), Watch(lambda: beside.append(is_beside()), waits.append):
        there = torch.arange(3.0).to(DEVICE, non_blocking=True)
        assert copied(there, DEVICE).device == DEVICE
        assert waits == []
        assert copied(there, torch.device("cpu")).tolist() == [0, 1, 2]
        assert "a copy between devices" in waits
    assert not any(beside)
