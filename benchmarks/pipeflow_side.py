"""A task under pipeflow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pipeflow
from benchmarks.task import Contender, Task


def contender(
    task: Task,
    rank: int,
    name: str,
    *,
    chunks: int = 1,
    known_shape: bool = True,
    **options: Any,
) -> Contender:
    """`name` is a schedule; without `known_shape` the shapes travel with the activations. `options` are of Pipeline."""
    model = pipeline(task, rank, name, chunks=chunks, known_shape=known_shape, **options)
    batch = (task.inputs, task.labels)
    label = "pipeflow" if known_shape else "pipeflow, no shape"
    return Contender(label, lambda: pipeflow.execute_pipeline(iter([batch]), model), [model], model)


def schedule_of(task: Task, name: str, chunks: int) -> pipeflow.Schedule:
    options = {"chunks": chunks} if chunks > 1 else {}
    return pipeflow.make_schedule(name, ranks=task.ranks, microbatches=task.microbatches, **options)


def pipeline(
    task: Task,
    rank: int,
    name: str,
    *,
    chunks: int = 1,
    known_shape: bool = True,
    **options: Any,
) -> pipeflow.Pipeline:
    schedule = schedule_of(task, name, chunks)
    return pipeflow.Pipeline(
        nn.ModuleList(task.stages_of(rank, schedule.placement)),
        schedule,
        criterion=task.criterion,
        tensor_shape=task.shape if known_shape else None,
        tensor_dtype=torch.float32,
        **options,
    )
