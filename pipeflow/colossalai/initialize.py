"""Launch from a configuration, as ColossalAI's tutorials do: its layout, its seed, its log."""

from __future__ import annotations

import os
import random
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeflow.colossalai.core import global_context
from pipeflow.core.errors import UsageError
from pipeflow.parallel import launch as parallel
from pipeflow.parallel.context import Context
from pipeflow.training.config import Config, read_config
from pipeflow.training.logging import get_dist_logger

Source = Config | Mapping[str, Any] | str | Path


def get_default_parser() -> ArgumentParser:
    """A parser of what `launch` takes; add your own options to it."""
    parser = ArgumentParser()
    parser.add_argument("--config", help="a Python file")
    parser.add_argument("--host", help="the machine of rank 0")
    parser.add_argument("--port", type=int, help="a free port of it")
    parser.add_argument("--world_size", type=int, help="how many processes there are")
    parser.add_argument("--rank", type=int, help="which of them this is")
    parser.add_argument("--local_rank", type=int, help="which of this machine's")
    parser.add_argument("--backend", choices=_BACKENDS, help="by default nccl where there is a GPU, else gloo")
    return parser


_BACKENDS = ("nccl", "gloo")


def launch_from_torch(
    config: Source,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: float = 60.0,
) -> Context:
    """Launches as torchrun's environment and `config` say; without that environment, a world of this process alone.

    Python's and torch's random numbers start from the configuration's seed, or `seed`, the same on all ranks of a
    stage and another one on each stage. With LOG_PATH each rank keeps a log there.

    Args:
        config: a dict, or the path of a Python file; see `Config`. Then `global_context.config`.
        backend: "gloo" computes on the CPU, "nccl" on GPUs; by default what the machine has.
        seed: where the configuration has none.
        verbose: whether rank 0 says how the ranks are laid out.
        timeout: seconds after which a wait for another rank gives up.

    Raises UsageError for a configuration or a world that cannot work.
    """
    checked = read_config(config)
    context = parallel.launch(checked.pipeline, checked.tensor, timeout=timeout, device=_device_for(backend))
    global_context.load_config(checked)
    _seed((seed if checked.seed is None else checked.seed) + 1024 * context.pipeline_rank)
    logger = get_dist_logger()
    if checked.log_path is not None:
        logger.log_to_file(checked.log_path)
    if verbose:
        sizes = f"data {context.data_size} x pipeline {context.pipeline_size} x tensor {context.tensor_size}"
        logger.info(f"{context.world_size} ranks: {sizes}, on {context.device.type}", ranks=[0])
    return context


def launch(
    config: Source,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: float = 60.0,
) -> Context:
    """As `launch_from_torch`, for processes that torchrun did not start: puts their place into this process's
    environment first. `local_rank` is by default the rank modulo this machine's GPUs.
    """
    local = rank % max(1, torch.cuda.device_count()) if local_rank is None else local_rank
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local))
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    return launch_from_torch(config, backend, seed, verbose, timeout=timeout)


def _device_for(backend: str | None) -> str | None:
    if backend not in (None, *_BACKENDS):
        raise UsageError(f"backend {backend!r} does not exist here: there are {' and '.join(_BACKENDS)}")
    if backend == "nccl" and not torch.cuda.is_available():
        raise UsageError("backend 'nccl' needs a GPU: use 'gloo', or leave it out")
    return "cpu" if backend == "gloo" else None


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
