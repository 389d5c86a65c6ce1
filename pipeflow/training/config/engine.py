"""make_engine: makes an Engine from a configuration. Must not contain: which keys a configuration has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.optim.rates import Scheduler
from pipeflow.parallel.context import current_context
from pipeflow.runtime.pipeline import Pipeline
from pipeflow.schedules import make_schedule
from pipeflow.training.config.launch import current_config
from pipeflow.training.config.schema import Config, read_config
from pipeflow.training.loop.engine import Engine

Source = Config | Mapping[str, Any] | str | Path


def make_engine(
    chunks: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[..., Tensor] | None = None,
    *,
    scheduler: Scheduler | None = None,
    schedule: Schedule | None = None,
    config: Source | None = None,
    **options: Any,
) -> Engine:
    """Makes an Engine for this rank's part of a model: its Pipeline, with the precision, clipping and accumulation of
    the configuration. All ranks call it together.

    If the configuration asks for 16-bit parameters, the model and the floating-point inputs of its stages are
    converted, and the criterion receives float32. Under autocast TENSOR_SHAPE is ignored, because the dtype of a
    stage's output depends on the model; shapes and dtypes are then sent in headers.

    Args:
        chunks: this rank's module, or an nn.ModuleList of its chunks.
        optimizer: an optimizer of their parameters.
        criterion: the loss function, as in Pipeline.
        scheduler: learning-rate scheduler, as in Engine.
        schedule: the schedule; by default 1f1b for one chunk, interleaved-1f1b for several, with NUM_MICRO_BATCHES.
        config: the configuration; by default the one passed to `launch_from_config`.
        options: further keyword arguments for Pipeline.

    Raises UsageError if the configuration lacks NUM_MICRO_BATCHES for a pipeline of several ranks, if NUM_CHUNKS is not
    the number of chunks, and as Pipeline, Engine and HalfPrecision do.
    """
    read = current_config() if config is None else read_config(config)
    read = Config() if read is None else read
    schedule = _schedule(read, chunks) if schedule is None else schedule
    precision = read.precision
    autocast = None if precision is None else precision.autocast
    if precision is not None and autocast is None:
        criterion = _convert(chunks, precision.parameters, criterion)
    pipeline = Pipeline(
        chunks,
        schedule,
        criterion=criterion,
        tensor_shape=None if autocast else read.tensor_shape,
        tensor_dtype=_dtype_of(chunks),
        autocast=autocast,
        **options,
    )
    return Engine(
        pipeline,
        optimizer if precision is None else precision.optimizer(pipeline, optimizer),
        scheduler=scheduler,
        gradient_accumulation=read.gradient_accumulation,
        clip_grad_norm=read.clip_grad_norm,
    )


def _schedule(config: Config, chunks: nn.Module) -> Schedule:
    """The default schedule for the chunks."""
    ranks, microbatches = current_context().pipeline_size, config.num_microbatches
    if microbatches is None and ranks > 1:
        raise UsageError(
            f"the configuration lacks NUM_MICRO_BATCHES: set the number of microbatches for a pipeline of {ranks} ranks"
        )
    count = len(chunks) if isinstance(chunks, nn.ModuleList) else 1
    if config.num_chunks not in (None, count):
        raise UsageError(f"NUM_CHUNKS is {config.num_chunks}, but the model has {count} per rank: make the two equal")
    if count == 1:
        return make_schedule("1f1b", ranks=ranks, microbatches=microbatches or 1)
    return make_schedule("interleaved-1f1b", ranks=ranks, microbatches=microbatches or 1, chunks=count)


def _dtype_of(chunks: nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter; float32 if there is none."""
    dtypes = (parameter.dtype for parameter in chunks.parameters() if parameter.is_floating_point())
    return next(dtypes, torch.float32)


def _convert(
    chunks: nn.Module, dtype: torch.dtype, criterion: Callable[..., Tensor] | None
) -> Callable[..., Tensor] | None:
    """Converts the chunks and, by hooks, their inputs; returns a criterion that takes their outputs."""
    chunks.to(dtype)

    def convert(_: nn.Module, positional: Any, keywords: Any) -> Any:
        return _to(dtype, positional), _to(dtype, keywords)

    for chunk in chunks if isinstance(chunks, nn.ModuleList) else [chunks]:
        chunk.register_forward_pre_hook(convert, with_kwargs=True)
    return None if criterion is None else InFloat(criterion)


def _to(dtype: torch.dtype, tree: Any) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(one, tree)


class InFloat(nn.Module):
    """A criterion that converts a model's 16-bit outputs to float32 first."""

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, output: Any, labels: Any) -> Tensor:
        return self.criterion(_to(torch.float32, output), labels)
