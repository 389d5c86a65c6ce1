"""A task under torch.distributed.pipelining, as its documentation tells one to run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from benchmarks.task import Contender, Task
from pipeflow import Placement


def one_f_one_b(task: Task, rank: int) -> Contender:
    chunks = task.chunks_of(rank, 1)
    stage = PipelineStage(chunks[0], rank, task.ranks, torch.device("cpu"))
    return _contender(task, rank, chunks, Schedule1F1B(stage, task.microbatches, loss_fn=task.criterion))


def interleaved(task: Task, rank: int, chunks: int) -> Contender:
    modules, stages = _looped(task, rank, chunks)
    return _contender(task, rank, modules, ScheduleInterleaved1F1B(stages, task.microbatches, loss_fn=task.criterion))


def _looped(task: Task, rank: int, chunks: int) -> tuple[list[nn.Module], list[Any]]:
    modules = task.chunks_of(rank, chunks)
    total, device = task.ranks * chunks, torch.device("cpu")
    return modules, [PipelineStage(each, rank + i * task.ranks, total, device) for i, each in enumerate(modules)]


def interleaved_zero_bubble(task: Task, rank: int, chunks: int) -> Contender:
    modules, stages = _looped(task, rank, chunks)
    schedule = ScheduleInterleavedZeroBubble(stages, task.microbatches, loss_fn=task.criterion)
    return _contender(task, rank, modules, schedule)


def zero_bubble_v(task: Task, rank: int) -> Contender:
    placement = Placement.vee(task.ranks)
    modules, stages = task.stages_of(rank, placement), placement.stages_of(rank)
    device = torch.device("cpu")
    pairs, total = zip(modules, stages, strict=True), 2 * task.ranks
    held: list[Any] = [PipelineStage(each, stage, total, device) for each, stage in pairs]
    schedule = ScheduleZBVZeroBubble(held, task.microbatches, loss_fn=task.criterion)
    return _contender(task, rank, modules, schedule, last=0)


def _contender(
    task: Task,
    rank: int,
    modules: list[nn.Module],
    schedule: Schedule1F1B | PipelineScheduleMulti,
    *,
    last: int | None = None,
) -> Contender:
    """`last`: the rank that computes the loss, the last one unless given."""
    inputs = (task.inputs,) if rank == 0 else ()
    last = task.ranks - 1 if last is None else last

    def step() -> Tensor | None:
        if rank != last:
            schedule.step(*inputs, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(*inputs, target=task.labels, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()

    return Contender("torch", step, modules, schedule)
