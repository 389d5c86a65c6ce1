"""A task under torch.distributed.pipelining, as its documentation tells one to run it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.task import Contender, Task


def one_f_one_b(task: Task, rank: int) -> Contender:
    chunks = task.chunks_of(rank, 1)
    stage = PipelineStage(chunks[0], rank, task.ranks, torch.device("cpu"))
    return _contender(task, rank, chunks, Schedule1F1B(stage, task.microbatches, loss_fn=task.criterion))


def interleaved(task: Task, rank: int, chunks: int) -> Contender:
    modules = task.chunks_of(rank, chunks)
    total, device = task.ranks * chunks, torch.device("cpu")
    stages = [PipelineStage(each, rank + i * task.ranks, total, device) for i, each in enumerate(modules)]
    return _contender(task, rank, modules, ScheduleInterleaved1F1B(stages, task.microbatches, loss_fn=task.criterion))


def _contender(
    task: Task, rank: int, modules: list[nn.Module], schedule: Schedule1F1B | ScheduleInterleaved1F1B
) -> Contender:
    inputs = (task.inputs,) if rank == 0 else ()

    def step() -> Tensor | None:
        if rank != task.ranks - 1:
            schedule.step(*inputs, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(*inputs, target=task.labels, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()

    return Contender("torch", step, modules, schedule)
