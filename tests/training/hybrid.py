"""A model cut in every way, into stages, halves of layers on tensor ranks and replicas; and the whole of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, make_schedule
from pipeflow.parallel.context import current_context
from pipeflow.parallel.group import Group
from pipeflow.parallel.split import Split
from pipeflow.testing.models import WIDTH, initial

INNER = 12
BLOCKS = 4
SAMPLES = 6


class _Sum(torch.autograd.Function):
    """Sums over the tensor ranks in one direction, and lets pass in the other."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, group: Group, ahead: bool) -> Tensor:
        context.group, context.ahead = group, ahead
        return _summed(hidden, group) if ahead else hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return (gradient if context.ahead else _summed(gradient, context.group)), None, None


def _summed(part: Tensor, group: Group) -> Tensor:
    total = part.contiguous().clone()
    group.all_reduce(total).wait()
    return total


class Block(nn.Module):
    """Two products around a nonlinearity, of whose inner width each tensor rank has a part, and a scale."""

    def __init__(self, index: int, group: Group | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        up, down = (initial(seed + index, INNER, WIDTH, dtype=torch.float64).data for seed in (100, 200))
        self.up = nn.Parameter(up.chunk(size)[rank].to(dtype))
        self.down = nn.Parameter(down.T.chunk(size, dim=1)[rank].to(dtype))
        self.scale = nn.Parameter(initial(300 + index, WIDTH, dtype=torch.float64).data.to(dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden * (1 + self.scale)
        inner = hidden if self.group is None else _Sum.apply(hidden, self.group, False)
        part = functional.linear(functional.gelu(functional.linear(inner, self.up)), self.down)
        return hidden + (part if self.group is None else _Sum.apply(part, self.group, True))

    def splits(self) -> Mapping[str, Split]:
        return {} if self.group is None else {"up": Split(0, INNER), "down": Split(1, INNER)}

    def partial_gradients(self) -> Collection[str]:
        return ()


def whole(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The model in one process."""
    return nn.Sequential(*(Block(index, None, dtype) for index in range(BLOCKS)))


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Pipeline:
    """This rank's part of it."""
    context = current_context()
    ranks = context.pipeline_size
    indices = range(BLOCKS * context.pipeline_rank // ranks, BLOCKS * (context.pipeline_rank + 1) // ranks)
    group = context.tensor if context.tensor_size > 1 else None
    module = nn.Sequential(*(Block(index, group, dtype) for index in indices))
    schedule = make_schedule("1f1b", ranks=ranks, microbatches=3)
    return Pipeline(module, schedule, criterion=functional.mse_loss, **options)


def batch(replica: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The batch of a replica."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    inputs, labels = (torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return inputs.to(dtype), labels.to(dtype)


def together(replicas: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The batches of all replicas, as one."""
    inputs, labels = zip(*(batch(replica, step, dtype) for replica in range(replicas)), strict=True)
    return torch.cat(inputs), torch.cat(labels)


def mine(step: int, dtype: torch.dtype = torch.float64) -> Any:
    """An iterator of the batch of this rank's replica."""
    return iter([batch(current_context().data_rank, step, dtype)])


def names_in_whole(pipeline: Pipeline) -> dict[str, str]:
    """Per name of this rank's parameters, what it is called in the whole model."""
    context = current_context()
    first = BLOCKS * context.pipeline_rank // context.pipeline_size
    found = {}
    for name, _ in pipeline.named_parameters():
        _, _, index, leaf = name.split(".")
        found[name] = f"{first + int(index)}.{leaf}"
    return found


def part_of(name: str, value: Tensor) -> Tensor:
    """What this tensor rank has of a whole weight."""
    context = current_context()
    dims = {"up": 0, "down": 1}
    leaf = name.split(".")[-1]
    return value.chunk(context.tensor_size, dims[leaf])[context.tensor_rank] if leaf in dims else value
