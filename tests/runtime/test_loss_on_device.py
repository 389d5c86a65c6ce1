"""A loss that a device still computes goes from device to device, with the same bits as one that the host knows."""

from __future__ import annotations

from typing import Any

import pytest

from pipeflow import execute_pipeline
from pipeflow.engine.runtime import loss
from pipeflow.testing import run_threads
from pipeflow.testing.models import TiedModel
from tests.runtime.work import build, schedule_of

MODEL = TiedModel()


def run_losses(name: str, sizes: list[int], broadcast: bool, training: bool) -> list[float | None]:
    pipeline = build(MODEL, schedule_of((name, 2, 1), 4))
    batches: Any = iter([MODEL.batch(size) for size in sizes])
    return [
        None
        if (told := execute_pipeline(batches, pipeline, forward_only=not training, broadcast_loss=broadcast).loss)
        is None
        else told.item()
        for _ in sizes
    ]


@pytest.mark.some(6)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_the_same_bits(name: str, data: int, broadcast: bool, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [8, 7, 4] if training else [8, 7, 3]
    expected = run_threads(run_losses, 2 * data, name, sizes, broadcast, training, data=data)
    monkeypatch.setattr(loss, "is_host", lambda device: False)
    assert run_threads(run_losses, 2 * data, name, sizes, broadcast, training, data=data) == expected
    if broadcast:
        assert None not in expected[0]
