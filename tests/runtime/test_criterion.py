"""A criterion that nothing says the divisor of is checked to be a mean over samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, execute_pipeline, make_schedule
from pipeflow.testing import run_threads

PADDING = 0


class Wrapped(nn.Module):
    """Flattens, and ignores padding."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(ignore_index=PADDING)

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(output.flatten(0, 1), labels.flatten())
        return loss


def over_labels(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=PADDING)


def over_samples(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def added(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")


def of_pairs(output: Tensor, labels: Tensor) -> Tensor:
    """Takes an even number of samples alone."""
    return (output[0::2].reshape(len(output) // 2, -1) - output[1::2].reshape(len(output) // 2, -1)).square().mean()


def train(criterion: Callable[..., Tensor], weigh: Any) -> float:
    """The loss of two steps; the random state after them must not depend on the check."""
    torch.manual_seed(0)
    labels = torch.randint(1, 5, (8, 6))
    labels[1, 1:] = labels[4, 3:] = PADDING
    model = Pipeline(nn.Linear(3, 5), make_schedule("1f1b", ranks=1, microbatches=2), criterion=criterion, weigh=weigh)
    batch = torch.randn(8, 6, 3), labels
    for _ in range(2):
        loss = execute_pipeline(iter([batch]), model).loss
    assert loss is not None
    return float(loss)


@pytest.mark.parametrize(
    ("criterion", "weigh", "warnings"),
    [
        (over_labels, None, 1),
        (Wrapped(), None, 1),
        (added, None, 1),
        (over_labels, lambda labels: (labels != PADDING).sum(), 0),
        (over_samples, None, 0),
        (of_pairs, None, 0),
    ],
)
def test_a_criterion_that_is_no_mean_over_samples_is_told_once(
    criterion: Callable[..., Tensor], weigh: Any, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pipeflow"):
        run_threads(train, 1, criterion, weigh)
    told = [record.message for record in caplog.records if "not a mean over samples" in record.message]
    assert len(told) == warnings
    assert all("pass weigh=" in message for message in told)
