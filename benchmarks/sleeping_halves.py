"""A stage that sleeps in its forward and in both halves of its backward, of which the second can wait for W."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.engine.deferral.products import Deferral


class SleepingHalves(nn.Module):
    """The identity; a forward and each half of a backward take `seconds`."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.seconds = seconds
        self.deferral: Deferral | None = None

    def deferred_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients wait for W."""
        return [self.weight]

    def forward(self, hidden: Tensor) -> Tensor:
        anchor = torch.empty(0, requires_grad=True)  # of the first stage, whose input wants no gradient
        output: Tensor = _Sleep.apply(hidden, anchor, self)  # type: ignore[no-untyped-call]  # as torch has it
        return output


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, _: Tensor, layer: SleepingHalves) -> Tensor:
        context.layer = layer
        time.sleep(layer.seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        layer: SleepingHalves = context.layer
        time.sleep(layer.seconds)
        assert layer.deferral is not None  # in a Pipeline
        layer.deferral.take(([layer.weight], partial(_slept, layer, gradients[0])))
        return gradients[0], None, None


def _slept(layer: SleepingHalves, gradient: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """The second half."""
    time.sleep(layer.seconds)
    return [(layer.weight, gradient.sum(0))]
