"""A stage that sleeps in its forward and in both halves of its backward, of which the second can wait for W."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.engine.deferral.products import Deferral, Deferred


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
        layer.deferral.take(_Slept(layer, gradients[0]))
        return gradients[0], None, None


class _Slept(Deferred):
    """The second half."""

    __slots__ = ("gradient", "layer")

    def __init__(self, layer: SleepingHalves, gradient: Tensor) -> None:
        self.layer = layer
        self.gradient = gradient

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return [self.layer.weight]

    def compute(self) -> list[tuple[nn.Parameter, Tensor]]:
        time.sleep(self.layer.seconds)
        return [(self.layer.weight, self.gradient.sum(0))]
