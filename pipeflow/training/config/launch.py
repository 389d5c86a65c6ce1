"""launch_from_config: a launch with the layout, seed and log of a configuration. Must not contain: how processes
connect.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.style  # noqa: F401  # draws from Python's generator when it is loaded: that must not happen after a seed
import torch

from pipeflow.parallel.context import Context, current_context, keep, kept
from pipeflow.parallel.launcher import launch
from pipeflow.tensor.random import manual_seed
from pipeflow.training.config.schema import Config, read_config
from pipeflow.training.logging import get_dist_logger

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
    context = launch(checked.pipeline, checked.tensor, timeout=timeout, device=device)
    keep_config(checked)
    _seed(seed if checked.seed is None else checked.seed, context)
    logger = get_dist_logger()
    if checked.log_path is not None:
        logger.log_to_file(checked.log_path)
    if verbose:
        sizes = f"data {context.data_size} x pipeline {context.pipeline_size} x tensor {context.tensor_size}"
        logger.info(f"{context.world_size} ranks: {sizes}, on {context.device.type}", ranks=[0])
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
