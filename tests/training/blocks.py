"""A model that any layout can cut, into stages, halves of layers on tensor ranks and replicas; and the whole of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow import Pipeline, make_schedule
from pipeflow.engine.parallel.context import current_context
from pipeflow.tensor import ColumnParallelLinear, RowParallelLinear
from pipeflow.testing.models import WIDTH, initial

INNER = 12
BLOCKS = 4
SAMPLES = 6


class Block(nn.Module):
    """A scale and two products around a nonlinearity."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        up.weight = initial(100 + index, INNER, WIDTH, dtype=dtype)
        down.weight = initial(200 + index, WIDTH, INNER, dtype=dtype)
        self.up: nn.Linear | ColumnParallelLinear = up
        self.down: nn.Linear | RowParallelLinear = down
        self.scale = initial(300 + index, WIDTH, dtype=dtype)

    def split(self) -> Block:
        """Its inner width over the tensor ranks."""
        assert isinstance(self.up, nn.Linear)
        assert isinstance(self.down, nn.Linear)
        self.up = ColumnParallelLinear.from_native_module(self.up)
        self.down = RowParallelLinear.from_native_module(self.down)
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        change: Tensor = self.down(functional.gelu(self.up(hidden * (1 + self.scale))))
        return hidden + change


def whole(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The model in one process."""
    return nn.Sequential(*(Block(index, dtype) for index in range(BLOCKS)))


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Pipeline:
    """This rank's part of it."""
    context = current_context()
    rank, ranks = context.pipeline_rank, context.pipeline_size
    indices = range(BLOCKS * rank // ranks, BLOCKS * (rank + 1) // ranks)
    module = nn.Sequential(*(Block(index, dtype).split() for index in indices))
    schedule = make_schedule("1f1b", ranks=ranks, microbatches=3)
    return Pipeline(module, schedule, criterion=functional.mse_loss, **options)


def batch(replica: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The batch of a replica."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    inputs, labels = (torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return inputs.to(dtype), labels.to(dtype)


def together(replicas: int, step: int) -> tuple[Tensor, Tensor]:
    """The batches of all replicas, as one."""
    inputs, labels = zip(*(batch(replica, step) for replica in range(replicas)), strict=True)
    return torch.cat(inputs), torch.cat(labels)


def mine(step: int, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Tensor, Tensor]]:
    """An iterator of the batch of this rank's replica."""
    return iter([batch(current_context().data_rank, step, dtype)])


def names_in_whole(pipeline: Pipeline) -> dict[str, str]:
    """Per name of this rank's parameters, what it is called in the whole model."""
    context = current_context()
    first = BLOCKS * context.pipeline_rank // context.pipeline_size
    found = {}
    for name, _ in pipeline.named_parameters():
        _, _, index, leaf = name.split(".", 3)
        found[name] = f"{first + int(index)}.{leaf}"
    return found


def part_of(name: str, value: Tensor) -> Tensor:
    """What this tensor rank has of a whole weight."""
    context, dims = current_context(), {"up": 0, "down": 1}
    layer = name.split(".")[1]
    return value.chunk(context.tensor_size, dims[layer])[context.tensor_rank] if layer in dims else value
