"""A tiny model, and what `initialize` makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipeflow.colossalai import initialize
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing.models import PlainModel
from pipeflow.training import read_config
from pipeflow.training.launch import keep_config

MODEL = PlainModel(dtype=torch.float64)


def samples(count: int, seed: int = 0, model: PlainModel = MODEL) -> TensorDataset:
    """A data set."""
    return TensorDataset(*model.batch(count, seed=seed))


def initialized(
    config: dict[str, Any],
    train: Any = None,
    *,
    chunks: int | None = None,
    model: PlainModel = MODEL,
    criterion: Callable[..., Any] | None = None,
    rates: Callable[[torch.optim.Optimizer], Any] | None = None,
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """What `initialize` gives for this rank's part of `model`, under `config`."""
    context = current_context()
    cut = model.cut(context.pipeline_size * (chunks or 1))[context.pipeline_rank :: context.pipeline_size]
    parts = [model.stage(*each) for each in cut]
    module = parts[0] if chunks is None else nn.ModuleList(parts)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    keep_config(read_config({"NUM_MICRO_BATCHES": 2, **config}))
    scheduler = None if rates is None else rates(optimizer)
    return initialize(
        module, optimizer, criterion or model.criterion, train, lr_scheduler=scheduler, verbose=False, **options
    )
