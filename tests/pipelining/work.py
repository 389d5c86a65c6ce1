"""A model for torch's API of pipelines, its stages on a rank, and its gradients in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeflow.adapters.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from pipeflow.pipelining import PipelineStage

WIDTH = 6
SAMPLES = 8
MICROBATCHES = 4
TOLERANCE = 1e-9
CPU = torch.device("cpu")


def model(stages: int) -> nn.ModuleList:
    """The same values on every rank."""
    torch.manual_seed(3)
    return nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]).double()


def batch(samples: int = SAMPLES, seed: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(2, samples, WIDTH, dtype=torch.float64, generator=generator)
    return inputs, targets


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples."""
    return nn.functional.mse_loss(output, target)


def serial(layers: nn.ModuleList, inputs: Tensor, targets: Tensor) -> tuple[nn.ModuleList, Tensor]:
    """A copy of the model with its gradients, and the loss."""
    whole = copy.deepcopy(layers)
    value = inputs
    for layer in whole:
        value = layer(value)
    loss = mean_loss(value, targets)
    loss.backward()
    return whole, loss.detach()


class Work:
    """A schedule of torch's API on this rank, with the stages that it holds under the placement of pipeflow."""

    def __init__(self, name: str, *, group: Any = None, **options: Any) -> None:
        kind = get_schedule_class(name)
        several = issubclass(kind, PipelineScheduleMulti)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.layers = model(ranks * (1 + several))
        self.last = len(self.layers) - 1
        v_shaped = name in ("ZBVZeroBubble", "DualPipeV", "v-half", "v-min")
        holders = [*range(ranks), *(reversed(range(ranks)) if v_shaped else range(ranks))]
        self.own = [stage for stage in range(self.last + 1) if holders[stage] == rank]
        stages = [PipelineStage(self.layers[stage], stage, self.last + 1, CPU, group=group) for stage in self.own]
        count = options.pop("microbatches", MICROBATCHES)
        options.setdefault("loss_fn", mean_loss)
        self.schedule = kind(stages if several else stages[0], count, **options)

    def arguments(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """What this rank passes to a step: inputs to the first stage, targets to the last."""
        args = {"x": inputs} if 0 in self.own else {}
        return {"args": tuple(args.values()), "target": targets if self.last in self.own else None}

    def step(self, inputs: Tensor, targets: Tensor, method: str = "step", **options: Any) -> Any:
        """One step."""
        given = self.arguments(inputs, targets)
        return getattr(self.schedule, method)(*given["args"], target=given["target"], **options)

    def error(self, whole: nn.ModuleList, factor: float = 1.0) -> float:
        """The largest relative difference of a gradient from `factor` times the one of a single process."""
        pairs = [
            (mine.grad, its.grad)
            for stage in self.own
            for mine, its in zip(self.layers[stage].parameters(), whole[stage].parameters(), strict=True)
        ]
        return max(difference(mine, factor * its) for mine, its in pairs if its is not None)


def difference(mine: Tensor | None, its: Tensor | None) -> float:
    """The largest difference, relative to the largest entry."""
    assert mine is not None
    assert its is not None
    return ((mine - its).abs().max() / its.abs().max()).item()


def together(losses: Sequence[Tensor]) -> float:
    """The mean of the microbatches' losses."""
    return torch.stack(list(losses)).mean().item()
