"""A task under torch.distributed.pipelining, as its documentation says, or under its names in pipeflow."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as theirs

from benchmarks.task import Contender, Task
from pipeflow import Placement


def one_f_one_b(task: Task, rank: int) -> Contender:
    return contender(task, rank, "1F1B", Placement.linear(task.ranks))


def interleaved(task: Task, rank: int, chunks: int) -> Contender:
    return contender(task, rank, "Interleaved1F1B", Placement.looped(task.ranks, chunks))


def interleaved_zero_bubble(task: Task, rank: int, chunks: int) -> Contender:
    return contender(task, rank, "InterleavedZeroBubble", Placement.looped(task.ranks, chunks))


def zero_bubble_v(task: Task, rank: int) -> Contender:
    return contender(task, rank, "ZBVZeroBubble", Placement.vee(task.ranks))


def contender(
    task: Task, rank: int, name: str, placement: Placement, library: ModuleType = theirs, label: str = "torch"
) -> Contender:
    """`name` is a schedule of `library`, the module of torch's schedules or of pipeflow's under the same names."""
    modules, stages = task.stages_of(rank, placement), placement.stages_of(rank)
    device, total = torch.device("cpu"), placement.num_stages
    held: list[Any] = [
        library.PipelineStage(each, stage, total, device) for each, stage in zip(modules, stages, strict=True)
    ]
    kind = library.get_schedule_class(name)
    single = not issubclass(kind, theirs.PipelineScheduleMulti)
    schedule = kind(held[0] if single else held, task.microbatches, loss_fn=task.criterion)
    return _contender(task, rank, modules, schedule, label, last=placement.rank_of(total - 1))


def _contender(task: Task, rank: int, modules: list[nn.Module], schedule: Any, label: str, *, last: int) -> Contender:
    """`last`: the rank that computes the loss."""
    inputs = (task.inputs,) if rank == 0 else ()

    def step() -> Tensor | None:
        if rank != last:
            schedule.step(*inputs, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(*inputs, target=task.labels, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()

    return Contender(label, step, modules, schedule)
