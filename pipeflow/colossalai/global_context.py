"""ColossalAI's questions about this process and its place: the global context, on `current_context()` and
`current_config()`, the device, and the DistCoordinator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from pipeflow.parallel.context import current_context, is_launched
from pipeflow.parallel.layout import WorldLayout
from pipeflow.parallel.transport.agreement import all_gather
from pipeflow.training.config.launch import current_config, keep_config


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


class Accelerator:
    """The device of this process. Raises UsageError before `launch`."""

    def get_current_device(self) -> torch.device:
        """Returns this process's device, which may be the CPU."""
        return current_context().device


def get_accelerator() -> Accelerator:
    """Returns what this process computes on."""
    return Accelerator()


def get_current_device() -> torch.device:
    """Returns this process's device. Raises UsageError before `launch`."""
    return current_context().device


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
            context = current_context()
            with context.alarm.raised_everywhere("DistCoordinator.block_all"):  # which opens channels after an error
                all_gather(context.world, [0.0])
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
