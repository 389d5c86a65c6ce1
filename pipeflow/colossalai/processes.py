"""The processes of a job: ColossalAI's launch functions, and the parser of their arguments; how processes are laid out,
which programs choose after their launch, with a Booster's plugin or a ShardConfig's group; and what scripts ask about a
process and its place.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from pipeflow.adapters.ranks import objects_of_all, require_whole_activations, wait_for_all
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel import launcher
from pipeflow.engine.parallel.context import Context, current_context, is_launched
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.random import manual_seed
from pipeflow.training.config import Config
from pipeflow.training.launch import current_config, keep_config, launch_from_config

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


def lay_out(pipeline: int, tensor: int) -> Context:
    """Returns a context with these pipeline and tensor sizes; further ranks are replicas. It is the current context if
    its sizes are the same, otherwise a new one for the same processes, with tensor-parallel dropout seeded from
    torch's seed on rank 0. All ranks call it together.

    Raises UsageError before a launch, and if the sizes do not fit the world; the current context then stays. Also
    raises it in a tensor mode other than "1d", and instead of dropping context or expert ranks.
    """
    if not is_launched():
        raise UsageError("nothing was launched: call colossalai.launch_from_torch() first")
    context = current_context()
    require_whole_activations(context)
    if (context.pipeline_size, context.tensor_size) == (pipeline, tensor):
        return context
    for name, size in (("context", context.context_size), ("experts", context.experts.size)):
        if size > 1:
            raise UsageError(
                f"the job was launched with {name}={size} and other pipeline or tensor sizes: launch with "
                f"parallel=dict(pipeline={pipeline}, tensor=dict(mode='1d', size={tensor}), {name}={size})"
            )
    WorldLayout.of(context.world_size, pipeline, tensor)
    everyone = objects_of_all(context, (pipeline, tensor, torch.initial_seed()))
    with context.alarm.raised_everywhere():
        if any(each[:2] != everyone[0][:2] for each in everyone):
            raise UsageError(f"the ranks ask for different (pipeline, tensor) sizes: {[each[:2] for each in everyone]}")
    config, timeout, device = current_config(), context.world.timeout, context.device
    context.close()
    context = launcher.launch(pipeline, tensor, timeout=timeout, device=device)
    keep_config(config)
    manual_seed(everyone[0][2])
    return context


def tensor_group(process_group: Any) -> Group:
    """Returns the tensor group for `process_group`. If it is a group of torch.distributed with neighbouring ranks, the
    layout is adapted to it. If it is a group of pipeflow, it is returned. If it is None, the group is the launch's
    tensor ranks, or the whole world if the launch has none.

    Raises UsageError if the ranks are not neighbours, and as `lay_out` does.
    """
    if isinstance(process_group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(process_group)
        context = lay_out(current_context().pipeline_size if is_launched() else 1, len(ranks))
        if list(context.layout.tensor_ranks(context.rank)) != ranks:
            raise UsageError(
                f"the tensor ranks of rank {context.rank} are {list(context.layout.tensor_ranks(context.rank))}, but "
                f"the process group has {ranks}: make groups of neighbouring ranks"
            )
        return context.tensor
    if process_group is not None:
        group: Group = process_group
        return group
    if is_launched() and current_context().layout == WorldLayout(data=current_context().world_size):
        return lay_out(1, current_context().world_size).tensor
    return lay_out(current_context().pipeline_size, current_context().tensor_size).tensor


class ParallelMode(Enum):
    """A set of ranks of the world, seen from one of them."""

    GLOBAL = "all"
    DATA = "those that hold the same weights for other data"
    PIPELINE = "those of one pipeline"
    TENSOR = "those that hold the other parts of the same layers"
    PARALLEL_1D = TENSOR
    MODEL = "those that hold one replica of the model together: tensor times pipeline"


class GlobalContext:
    """The global context. All methods except `is_initialized` raise UsageError before `launch`."""

    @property
    def config(self) -> Any:
        """The job's configuration; None if it was launched without one."""
        return current_config() if is_launched() else None

    def load_config(self, config: object) -> None:
        """Makes `config` the configuration of this process. The functions that launch a job call it."""
        keep_config(config)

    def is_initialized(self, mode: ParallelMode) -> bool:
        """Returns True once the job is launched, for every mode."""
        return is_launched()

    def get_global_rank(self) -> int:
        """Returns this process's rank in the world."""
        return current_context().rank

    def get_ranks_in_group(self, mode: ParallelMode) -> list[int]:
        """Returns the world ranks of the mode's ranks, including this one, in ascending order."""
        context = current_context()
        return list(_RANKS[mode](context.layout, context.rank))

    def get_world_size(self, mode: ParallelMode) -> int:
        """Returns the number of the mode's ranks."""
        return len(self.get_ranks_in_group(mode))

    def get_local_rank(self, mode: ParallelMode) -> int:
        """Returns this rank's index among the mode's ranks, from 0."""
        return self.get_ranks_in_group(mode).index(self.get_global_rank())

    def is_first_rank(self, mode: ParallelMode) -> bool:
        """Returns True if this is the first of the mode's ranks."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        """Returns True if this is the last of the mode's ranks."""
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def is_pipeline_first_stage(self) -> bool:
        """Returns True if this is the first rank of its pipeline."""
        return self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self) -> bool:
        """Returns True if this is the last rank of its pipeline."""
        return self.is_last_rank(ParallelMode.PIPELINE)

    @property
    def tensor_parallel_size(self) -> int:
        return current_context().tensor_size

    @property
    def pipeline_parallel_size(self) -> int:
        return current_context().pipeline_size

    @property
    def data_parallel_size(self) -> int:
        return current_context().data_size

    def destroy(self) -> None:
        """Closes the channels and drops the configuration. Does nothing if nothing was launched."""
        if is_launched():
            current_context().close()


_RANKS: Mapping[ParallelMode, Callable[[WorldLayout, int], Sequence[int]]] = {
    ParallelMode.GLOBAL: lambda layout, _: range(layout.world_size),
    ParallelMode.DATA: WorldLayout.data_ranks,
    ParallelMode.PIPELINE: WorldLayout.pipeline_ranks,
    ParallelMode.TENSOR: WorldLayout.tensor_ranks,
    ParallelMode.MODEL: WorldLayout.replica_ranks,
}

global_context = GlobalContext()


def get_current_device() -> torch.device:
    """Returns this process's device, which may be the CPU. Raises UsageError before `launch`."""
    return current_context().device


def get_accelerator() -> SimpleNamespace:
    """Returns an object whose method `get_current_device` is the function of this name."""
    return SimpleNamespace(get_current_device=get_current_device)


def is_using_pp() -> bool:
    """Returns True if the pipeline has several ranks. Raises UsageError before `launch`."""
    return current_context().pipeline_size > 1


class DistCoordinator:
    """The place of this process among all processes. Raises UsageError before `launch`. Methods with an argument
    `process_group` mean the ranks of that group of torch.distributed; by default all ranks.
    """

    @property
    def rank(self) -> int:
        return current_context().rank

    @property
    def world_size(self) -> int:
        return current_context().world_size

    @property
    def local_rank(self) -> int:
        """Index of this process on its machine, from torchrun's environment; 0 without it."""
        return int(os.environ.get("LOCAL_RANK") or 0)

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Returns True on the first rank."""
        return self._ranks(process_group)[0] == self.rank

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Returns True on the last rank."""
        return self._ranks(process_group)[-1] == self.rank

    def is_node_master(self) -> bool:
        """Returns True on the first rank of this machine."""
        return self.local_rank == 0

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        """Prints `msg` on the first rank of `process_group`, or of the world if that is None."""
        if self.is_master(process_group):
            print(msg, flush=True)  # noqa: T201  # what it is for

    def print_on_node_master(self, msg: str) -> None:
        """Prints on the first rank of each machine."""
        if self.is_node_master():
            print(msg, flush=True)  # noqa: T201  # what it is for

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Waits until all ranks have come here. Without a group, raises PipelineError if a rank has left."""
        if process_group is None:
            wait_for_all(current_context(), "DistCoordinator.block_all")
        else:
            dist.barrier(process_group)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """The rank with index `executor_rank` runs the `with` block first; then the others run it."""
        is_first = self._ranks(process_group)[executor_rank] == self.rank
        if not is_first:
            self.block_all(process_group)
        yield
        if is_first:
            self.block_all(process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Returns a decorator of functions that then run on the first rank alone, and return None elsewhere."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def called(*arguments: Any, **options: Any) -> Any:
                return function(*arguments, **options) if self.is_master(process_group) else None

            return called

        return decorate

    def _ranks(self, process_group: dist.ProcessGroup | None) -> Sequence[int]:
        return range(self.world_size) if process_group is None else dist.get_process_group_ranks(process_group)
