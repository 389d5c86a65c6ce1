"""A launch as a configuration says: its layout, its seed, its log. What must not live here: how processes meet."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeflow.parallel.context import Context, current_context, keep, kept
from pipeflow.parallel.launch import launch
from pipeflow.tensor.random import manual_seed
from pipeflow.training.config import Config, read_config
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
    """Launches as torchrun's environment and `config` say; without that environment, a world of this process alone.
    Then `current_config()` is what was read.

    Python's and torch's random numbers start from the configuration's seed, or `seed`, the same on all ranks of a
    stage and another one on each stage; so do those of dropout over tensor ranks (`pipeflow.tensor.manual_seed`). With
    LOG_PATH each rank keeps a log there.

    Args:
        config: a dict, or the path of a Python file; see `Config`.
        seed: where the configuration has none.
        verbose: whether rank 0 says how the ranks are laid out.
        timeout, device: as of `launch`.

    Raises UsageError for a configuration or a world that cannot work.
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
    """Makes `config` the current one; for launchers other than `launch_from_config`."""
    keep(_CONFIG, config)


def current_config() -> Any:
    """What this job was configured with; None when it was launched without a configuration. Raises UsageError when
    there is no context.
    """
    current_context()
    return kept(_CONFIG)


def _seed(number: int, context: Context) -> None:
    of_stage = number + 1024 * context.pipeline_rank
    random.seed(of_stage)
    torch.manual_seed(of_stage)
    manual_seed(number)
