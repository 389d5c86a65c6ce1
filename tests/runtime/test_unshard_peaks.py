"""The bytes of a step with unshards, counted at every computation, are those of the simulated timeline: those of whole
weights, and those that forwards save.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from pipeflow import CostModel, Pipeline, Schedule, execute_pipeline, simulate, with_optimizer_step, with_unshard
from pipeflow.core.dataflow import Content
from pipeflow.engine.parallel.context import current_context
from pipeflow.optim import PipelinedOptimizer
from pipeflow.schedules import SCHEDULES
from pipeflow.testing import run_processes
from tests.families import make_near

SAVED, WEIGHT = 4000, 16000  # bytes that a stage saves for a microbatch, and those of its whole weight


class Count:
    """The bytes of this rank's whole weights and saved tensors, and the most that there were at a computation."""

    def __init__(self) -> None:
        self.modules: list[FSDPModule] = []
        self.saved = self.most = 0

    def whole(self) -> int:
        """A gather under way has its memory too, until the weights are made of it."""
        groups = [group for module in self.modules for group in module._get_fsdp_state()._fsdp_param_groups]
        tensors = [each for group in groups for param in group.fsdp_params for each in param.all_gather_outputs]
        tensors += [group._all_gather_result.all_gather_output for group in groups if group._all_gather_result]
        return sum(tensor.untyped_storage().size() for tensor in tensors)

    def look(self) -> None:
        self.most = max(self.most, self.saved + self.whole())


class Keeping(torch.autograd.Function):
    """Keeps a tensor for its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, count: Count) -> Tensor:
        ctx.count, ctx.shape = count, weight.shape
        count.saved += SAVED
        count.look()
        return hidden * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.count.look()
        ctx.count.saved -= SAVED
        return gradient, gradient.new_ones(ctx.shape), None


class Stage(nn.Module):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.ones(WEIGHT // 4))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = Keeping.apply(hidden, self.weight, self.count)  # type: ignore[no-untyped-call]
        return output


def counted(schedules: list[Schedule]) -> list[int]:
    """Per schedule, the most bytes of this rank in the second of two steps."""
    context, found = current_context(), []
    for schedule in schedules:
        count = Count()
        stages = nn.ModuleList(Stage(count) for _ in schedule.placement.stages_of(context.pipeline_rank))
        count.modules = [fully_shard(stage, mesh=context.mesh["data"]) for stage in stages]
        model = Pipeline(stages, schedule, criterion=lambda output, _: output.mean())
        optimizer = PipelinedOptimizer(model, torch.optim.SGD(model.parameters()))
        for _ in range(2):
            count.most = 0
            execute_pipeline(iter([(torch.ones(schedule.num_microbatches, 4), None)]), model)
        optimizer.confirm()
        assert (count.saved, count.whole()) == (0, 0)
        found.append(count.most)
    return found


def planned(schedule: Schedule) -> tuple[float, ...]:
    stages = schedule.placement.num_stages
    even = CostModel((1,) * stages, (2,) * stages, (0,) * stages, saved_bytes=(SAVED,) * stages)
    return simulate(schedule, replace(even, kept_bytes={Content.WEIGHTS: (WEIGHT,) * stages})).peak_bytes


def gathered() -> list[Schedule]:
    found = []
    for number, name in enumerate(SCHEDULES):
        plain = make_near(name, ranks=2, microbatches=4).without_pairs()
        if len(plain.placement.paths) == 1:
            ahead = with_unshard(plain, most=2 + number % 2, ahead=None if number % 3 else 0)
            found.append(with_optimizer_step(ahead))
    return found


@pytest.mark.slow
def test_whole_weights_take_what_is_planned() -> None:
    schedules = gathered()
    ranks = run_processes(counted, 4, schedules, data=2)
    for number, schedule in enumerate(schedules):
        for rank, limit in enumerate(planned(schedule)):
            for found in (ranks[rank][number], ranks[rank + 2][number]):
                assert 0.97 * limit <= found <= limit, schedule.name
