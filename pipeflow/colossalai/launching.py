"""ColossalAI's launches, and the parser of what they take."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.training.config import Config
from pipeflow.training.launch import launch_from_config

Source = Config | Mapping[str, Any] | str | Path
_BACKENDS = ("nccl", "gloo")


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


def launch_from_torch(
    config: Source | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: float = 60.0,
) -> Context:
    """`launch_from_config`, by default of an empty configuration. `backend` "gloo" computes on the CPU, "nccl" on GPUs;
    by default it is what the machine has.

    Raises UsageError for a backend that is not there, and as `launch_from_config`.
    """
    source, device = {} if config is None else config, _device_for(backend)
    return launch_from_config(source, seed=seed, verbose=verbose, timeout=timeout, device=device)


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


def launch_from_slurm(config: Source, host: str, port: int, backend: str | None = None, **options: Any) -> Context:
    """As `launch`, for processes that srun started. Raises UsageError where Slurm's variables are missing."""
    rank, world_size, local_rank = _numbers("srun", "SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")
    return launch(config, rank, world_size, host, port, backend, local_rank, **options)


def launch_from_openmpi(config: Source, host: str, port: int, backend: str | None = None, **options: Any) -> Context:
    """As `launch`, for processes that OpenMPI's mpirun started. Raises UsageError where its variables are missing."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    rank, world_size, local_rank = _numbers("mpirun", *names)
    return launch(config, rank, world_size, host, port, backend, local_rank, **options)


def _numbers(launcher: str, *names: str) -> list[int]:
    """What `launcher` put into this process's environment."""
    if missing := [name for name in names if not os.environ.get(name, "").isdecimal()]:
        raise UsageError(f"{missing[0]} is not a number in this environment: start the program with {launcher}")
    return [int(os.environ[name]) for name in names]


def _device_for(backend: str | None) -> str | None:
    if backend not in (None, *_BACKENDS):
        raise UsageError(f"backend {backend!r} does not exist here: there are {' and '.join(_BACKENDS)}")
    if backend == "nccl" and not torch.cuda.is_available():
        raise UsageError("backend 'nccl' needs a GPU: use 'gloo', or leave it out")
    return "cpu" if backend == "gloo" else None
