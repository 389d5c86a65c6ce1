"""Labels that lie on the GPU weigh microbatches as labels in CPU memory do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeflow import Pipeline, execute_pipeline, make_schedule
from tests.nccl.device import DEVICE
from tests.nccl.recorder import recorded


def weigh(found: dict[str, Any]) -> None:
    layer, schedule = nn.Linear(3, 4), make_schedule("gpipe", ranks=1, microbatches=2)
    pipeline = Pipeline(layer, schedule, criterion=nn.CrossEntropyLoss(ignore_index=0))
    inputs, labels = torch.ones(4, 3), torch.tensor([1, 2, 3, 0])
    for device in ("cpu", DEVICE):
        output = execute_pipeline(iter([(inputs.to(device), labels.to(device))]), pipeline)
        assert output.loss is not None
        found[str(device)] = output.weight, output.loss.item()


def test_labels_on_the_device_are_counted_once_they_are_there() -> None:
    found: dict[str, Any] = {}
    recorded(weigh, 1, found)
    assert found["cuda:0"] == found["cpu"]
    assert found["cpu"][0] == 3
