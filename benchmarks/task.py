"""What all contenders of a benchmark are given: the same stages, the same batch, the same loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow import Placement


@dataclass(frozen=True)
class Task:
    """A model of stages in a row, all of whose activations have the shape of its input, and one batch.

    `make_stages(n)` makes the whole model as n stages, always with the same parameters.
    """

    ranks: int
    microbatches: int
    make_stages: Callable[[int], list[nn.Module]]
    criterion: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    labels: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one microbatch's activation."""
        samples, *rest = self.inputs.shape
        return (samples // self.microbatches, *rest)

    def chunks_of(self, rank: int, chunks: int) -> list[nn.Module]:
        """The stages of `rank` when every rank holds `chunks` of them, stage s on rank s modulo `ranks`."""
        return self.stages_of(rank, Placement.looped(self.ranks, chunks))

    def stages_of(self, rank: int, placement: Placement) -> list[nn.Module]:
        """The stages of `rank`, in chunk order."""
        stages = self.make_stages(placement.num_stages)
        return [stages[stage] for stage in placement.stages_of(rank)]


@dataclass(frozen=True)
class Contender:
    """One way to run a training step of a task on this rank. `modules` holds what it trains, `runner` what runs it,
    for whoever counts inside it.
    """

    name: str
    step: Callable[[], object]
    modules: list[nn.Module]
    runner: Any = None

    def zero_grad(self) -> None:
        for module in self.modules:
            module.zero_grad()

    def gradients(self) -> list[Tensor]:
        return gradients(self.modules)


def gradients(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The gradient of every parameter, zeros where there is none."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]


def check(task: Task, contender: Contender, rank: int, placement: Placement) -> None:
    """One step of `contender` must leave the plain model's gradients: mean loss over the samples of the batch.

    Raises AssertionError naming the contender and the worst relative difference.
    """
    stages = task.make_stages(placement.num_stages)
    task.criterion(nn.Sequential(*stages)(task.inputs), task.labels).backward()
    contender.zero_grad()
    contender.step()
    held = [stages[stage] for stage in placement.stages_of(rank)]
    pairs = zip(contender.gradients(), gradients(held), strict=True)
    worst = max(((ours - plain).norm() / plain.norm().clamp_min(1e-12)).item() for ours, plain in pairs)
    if not worst < 1e-4:
        raise AssertionError(f"{contender.name}: gradients differ from the plain model's by {worst:.1e} on rank {rank}")
