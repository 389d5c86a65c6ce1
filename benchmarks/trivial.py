"""The task of the benchmarks that ask what a step costs besides its computations: stages that do nearly nothing."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import LinearStage, TrivialStage
from benchmarks.task import Task


def make_task(ranks: int, microbatches: int, width: int = 16, *, linear: bool = False) -> Task:
    """`linear`: stages with a weight gradient that can be deferred."""
    stage = LinearStage if linear else TrivialStage

    def make_stages(number: int) -> list[nn.Module]:
        torch.manual_seed(1)
        return [stage(width) for _ in range(number)]

    torch.manual_seed(0)
    inputs, labels = torch.randn(2, 2 * microbatches, width)
    return Task(ranks, microbatches, make_stages, functional.mse_loss, inputs=inputs, labels=labels)
