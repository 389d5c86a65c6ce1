"""ColossalAI's launch functions, and the parser of their arguments."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context
from pipeflow.training.config import Config
from pipeflow.training.launch import launch_from_config

Source = Config | Mapping[str, Any] | str | Path
_KINDS = {"TENSOR_SHAPE": (tuple, list), "NUM_CHUNKS": (int,)}


def with_variables(config: Source) -> Source:
    """Returns the configuration; if it is a dict, with TENSOR_SHAPE and NUM_CHUNKS from the script that Python runs,
    unless the dict has them.
    """
    if not isinstance(config, Mapping):
        return config
    script, model = vars(sys.modules["__main__"]), config.get("model")
    known = {*config, *(["NUM_CHUNKS"] if isinstance(model, Mapping) and "num_chunks" in model else [])}
    found = {
        name: script[name]
        for name, kinds in _KINDS.items()
        if name not in known and isinstance(script.get(name), kinds)
    }
    return {**found, **config}


BACKENDS = ("nccl", "gloo")


def launch_from_torch(
    config: Source | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: float = 60.0,
) -> Context:
    """Calls `launch_from_config` in a process that torchrun started.

    Args:
        config: the configuration; by default empty. If it is a dict without TENSOR_SHAPE or NUM_CHUNKS, these are
            variables of the script that Python runs, if it has them.
        backend: "gloo" computes on the CPU, "nccl" on GPUs; by default on GPUs if the machine has any.
        seed, verbose, timeout: as in `launch_from_config`.

    Raises UsageError for an unknown or missing backend, and as `launch_from_config` does.
    """
    device = _device_for(backend)
    source = with_variables({} if config is None else config)
    return launch_from_config(source, seed=seed, verbose=verbose, timeout=timeout, device=device)


def _after_config(function: Callable[..., Context]) -> Callable[..., Context]:
    """The function, which may also get `config` before its other arguments, as in older versions of ColossalAI."""
    places = signature(function)

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Context:
        try:
            leads = not str(places.bind(*arguments, **options).arguments["port"]).isdecimal()
        except TypeError:
            leads = bool(arguments) and not isinstance(arguments[0], int)
        if leads:
            config, *others = arguments
            return function(*others, config=config, **options)
        return function(*arguments, **options)

    return called


@_after_config
def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    config: Source | None = None,
    timeout: float = 60.0,
) -> Context:
    """Like `launch_from_torch`, for processes that torchrun did not start; it first sets torchrun's environment
    variables. A configuration may also be the first argument: `launch(config, rank, world_size, host, port)`.

    Args:
        rank: index of this process, from 0.
        world_size: number of processes.
        host: host name or address of rank 0's machine.
        port: a free port on that machine.
        local_rank: index of this process on its machine; by default the rank modulo the number of GPUs here.
        config, backend, seed, verbose, timeout: as in `launch_from_torch`.
    """
    local = rank % max(1, torch.cuda.device_count()) if local_rank is None else local_rank
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local))
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    return launch_from_torch(config, backend, seed, verbose, timeout=timeout)


@_after_config
def launch_from_slurm(host: str, port: int, backend: str | None = None, **options: Any) -> Context:
    """Like `launch`, for processes that srun started. Raises UsageError if Slurm's variables are missing."""
    rank, world_size, local_rank = _numbers("srun", "SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")
    return launch(rank, world_size, host, port, backend, local_rank, **options)


@_after_config
def launch_from_openmpi(host: str, port: int, backend: str | None = None, **options: Any) -> Context:
    """Like `launch`, for processes that OpenMPI's mpirun started. Raises UsageError if its variables are missing."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    rank, world_size, local_rank = _numbers("mpirun", *names)
    return launch(rank, world_size, host, port, backend, local_rank, **options)


def _numbers(launcher: str, *names: str) -> list[int]:
    """Numbers that `launcher` put into this process's environment."""
    if missing := [name for name in names if not os.environ.get(name, "").isdecimal()]:
        raise UsageError(f"the environment variable {missing[0]} is not a number: start the program with {launcher}")
    return [int(os.environ[name]) for name in names]


def _device_for(backend: str | None) -> str | None:
    if backend not in (None, *BACKENDS):
        raise UsageError(f"backend {backend!r} is not supported: use {' or '.join(BACKENDS)}")
    if backend == "nccl" and not torch.cuda.is_available():
        raise UsageError("backend 'nccl' needs a GPU: use 'gloo', or remove backend")
    return "cpu" if backend == "gloo" else None


def get_default_parser() -> ArgumentParser:
    """Returns a parser of the arguments of `launch`; add your own options to it."""
    parser = ArgumentParser()
    parser.add_argument("--config", help="a Python file")
    parser.add_argument("--host", help="host name or address of rank 0's machine")
    parser.add_argument("--port", type=int, help="a free port on that machine")
    parser.add_argument("--world_size", type=int, help="number of processes")
    parser.add_argument("--rank", type=int, help="index of this process, from 0")
    parser.add_argument("--local_rank", type=int, help="index of this process on its machine, from 0")
    parser.add_argument("--backend", choices=BACKENDS, help="by default nccl if there is a GPU, else gloo")
    return parser
