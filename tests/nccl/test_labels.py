"""Labels that lie on the GPU weigh microbatches as labels in CPU memory do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeflow import Pipeline, UsageError, execute_pipeline, make_schedule
from tests.losses.test_check import less_than_the_batch
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


def refuse() -> None:
    inputs, labels = torch.ones(4, 3, 4), torch.ones(4, 3, dtype=torch.long)
    pipeline = Pipeline(nn.Linear(4, 5), make_schedule("gpipe", ranks=1, microbatches=2), criterion=less_than_the_batch)
    with pytest.raises(UsageError, match="made up for some samples"):
        execute_pipeline(iter([(inputs.to(DEVICE), labels.to(DEVICE))]), pipeline)


def test_a_loss_is_tried_on_the_device() -> None:
    recorded(refuse, 1)


def test_labels_on_the_device_are_counted_once_they_are_there() -> None:
    found: dict[str, Any] = {}
    recorded(weigh, 1, found)
    assert found["cuda:0"] == found["cpu"]
    assert found["cpu"][0] == 3
