"""Training from a configuration: the launch with its layout, seed and log, and the Engine that it describes. Must not
contain: which keys a configuration has, and how processes connect.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rich.style  # noqa: F401  # draws from Python's generator when it is loaded: that must not happen after a seed
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.engine.parallel.context import Context, current_context, keep, kept
from pipeflow.engine.parallel.launcher import launch
from pipeflow.engine.runtime.pipeline import Pipeline
from pipeflow.engine.tensor.random import manual_seed
from pipeflow.engine.torch_private.trees import tree_map
from pipeflow.schedules import make_schedule
from pipeflow.training.config import Config, read_config
from pipeflow.training.engine import Engine
from pipeflow.training.logging import get_dist_logger
from pipeflow.training.optim.rates import Scheduler

_CONFIG = "configuration"


def launch_from_config(
    config: Config | Mapping[str, Any] | str | Path,
    *,
    seed: int = 1024,
    verbose: bool = True,
    timeout: float = 60.0,
    device: torch.device | str | None = None,
) -> Context:
    """Calls `launch` with the layout in `config`. Without torchrun's environment, the world is this process alone.
    Afterwards `current_config()` returns the configuration.

    Seeds Python's and torch's random numbers, differently on each pipeline rank and alike on ranks of other
    replicas and tensor ranks, and the generators of tensor-parallel dropout (`pipeflow.tensor.manual_seed`). If the
    configuration has LOG_PATH, each rank writes a log file there.

    Args:
        config: a dict, the path of a Python file, or a Config.
        seed: the seed if the configuration has none.
        verbose: if True, rank 0 logs the layout.
        timeout, device: as in `launch`.

    Raises UsageError for an invalid configuration or a layout that does not fit the world; also `launch`'s errors.
    """
    checked = read_config(config)
    context = launch(
        checked.pipeline,
        checked.tensor,
        context=checked.context,
        experts=checked.experts,
        tensor_mode=checked.tensor_mode,
        tensor_depth=checked.tensor_depth,
        timeout=timeout,
        device=device,
    )
    keep_config(checked)
    _seed(seed if checked.seed is None else checked.seed, context)
    logger = get_dist_logger()
    if checked.log_path is not None:
        logger.log_to_file(checked.log_path)
    if verbose:
        told = f"data {context.data_size} x pipeline {context.pipeline_size} x tensor {checked.tensor}"
        if context.grid is not None:
            told += f" ({context.layout.tensor_mode})"
        if context.context_size > 1:
            told += f" x context {context.context_size}"
        if context.experts.size > 1:
            told += f", experts over {context.experts.size} replicas"
        logger.info(f"{context.world_size} ranks: {told}, on {context.device.type}", ranks=[0])
    return context


def keep_config(config: object) -> None:
    """Makes `config` the current configuration. For launchers other than `launch_from_config`."""
    keep(_CONFIG, config)


def current_config() -> Any:
    """Returns this job's configuration; None if it was launched without one. Raises UsageError before the launch."""
    current_context()
    return kept(_CONFIG)


def _seed(number: int, context: Context) -> None:
    of_stage = number + 1024 * context.pipeline_rank
    random.seed(of_stage)
    torch.manual_seed(of_stage)
    manual_seed(number)


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
