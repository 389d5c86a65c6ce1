"""The processes of a job: how they are laid out, which ColossalAI's programs choose after their launch, with a
Booster's plugin or a ShardConfig's group; groups of torch.distributed along the axes of a grid; and what scripts ask
about a process and its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from pipeflow.adapters.ranks import objects_of_all, wait_for_all
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context, current_context, is_launched
from pipeflow.engine.parallel.launcher import launch
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.random import manual_seed
from pipeflow.training.launch import current_config, keep_config


def lay_out(pipeline: int, tensor: int) -> Context:
    """Returns a context with these pipeline and tensor sizes; further ranks are replicas. It is the current context if
    its sizes are the same, otherwise a new one for the same processes, with tensor-parallel dropout seeded from
    torch's seed on rank 0. All ranks call it together.

    Raises UsageError before a launch, and if the sizes do not fit the world; the current context then stays.
    """
    if not is_launched():
        raise UsageError("nothing was launched: call colossalai.launch_from_torch() first")
    context = current_context()
    if (context.pipeline_size, context.tensor_size) == (pipeline, tensor):
        return context
    WorldLayout.of(context.world_size, pipeline, tensor)
    everyone = objects_of_all(context, (pipeline, tensor, torch.initial_seed()))
    with context.alarm.raised_everywhere():
        if any(each[:2] != everyone[0][:2] for each in everyone):
            raise UsageError(f"the ranks ask for different (pipeline, tensor) sizes: {[each[:2] for each in everyone]}")
    config, timeout, device = current_config(), context.world.timeout, context.device
    context.close()
    context = launch(pipeline, tensor, timeout=timeout, device=device)
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


class ProcessGroupMesh:
    """All processes as a grid, and torch.distributed's groups along its axes. All ranks make the same calls of methods
    that make groups.

    Args:
        size: number of ranks along each axis; the ranks along the last axis are neighbours.

    Raises UsageError before `launch`, and if the sizes do not multiply to the number of processes.
    """

    def __init__(self, *size: int) -> None:
        context = current_context()
        if prod(size) != context.world_size:
            raise UsageError(f"a mesh of {' x '.join(map(str, size))} does not have {context.world_size} processes")
        self.shape = size
        self.rank = context.rank
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Returns the number of ranks along an axis; by default those along each axis."""
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Returns this rank's index along an axis; by default those along each axis."""
        place = self.unravel(self.rank, self.shape)
        return place if dim is None else place[dim]

    @staticmethod
    def unravel(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the indices of a rank along each axis."""
        return tuple(int(index) for index in torch.unravel_index(torch.tensor(rank, device="cpu"), tuple(shape)))

    @staticmethod
    def ravel(coord: Sequence[int], shape: Sequence[int], mode: str = "raise") -> int:
        """Returns the rank with these indices.

        Args:
            coord: index along each axis.
            shape: number of ranks along each axis.
            mode: an index that is too large or too small is an error with "raise", counts modulo the axis's length with
                "wrap", and means the nearest one with "clip".

        Raises UsageError for another mode, and for such an index.
        """
        if mode not in ("raise", "wrap", "clip"):
            raise UsageError(f"mode must be raise, wrap or clip, got {mode!r}")
        rank = 0
        for index, length in zip(coord, shape, strict=True):
            near = index % length if mode == "wrap" else min(max(index, 0), length - 1)
            if mode == "raise" and near != index:
                raise UsageError(f"there is no rank at {tuple(coord)} of a mesh of {' x '.join(map(str, shape))}")
            rank = rank * length + near
        return rank

    @staticmethod
    def get_coords_along_axis(
        base_coord: Sequence[int], axis: int | Sequence[int], indices_at_axis: Sequence[Any]
    ) -> list[tuple[int, ...]]:
        """Returns the places that differ from `base_coord` along the axes; there they have the given indices."""
        chosen = {axis: indices_at_axis} if isinstance(axis, int) else dict(zip(axis, indices_at_axis, strict=True))
        return list(product(*(chosen.get(each, (index,)) for each, index in enumerate(base_coord))))

    def get_group(self, ranks_in_group: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Returns the group of these ranks, which it makes once."""
        ranks = tuple(sorted(ranks_in_group))
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), backend=backend)
        return self._groups[ranks]

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """Returns the ranks in the world of the group's members."""
        return dist.get_process_group_ranks(group)

    def get_group_along_axis(
        self, axis: int | Sequence[int], indices_at_axis: Sequence[Any] | None = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Returns this rank's group of the ranks that differ along the axes. All groups along these axes are made.

        Args:
            axis: one or several axes.
            indices_at_axis: indices along the axis, or along each of them; by default all. None is returned on ranks
                with other indices.
            backend: torch.distributed's backend.
        """
        axes = [axis] if isinstance(axis, int) else list(axis)
        given = indices_at_axis and ([indices_at_axis] if isinstance(axis, int) else indices_at_axis)
        chosen = given or [range(self.shape[each]) for each in axes]
        firsts = product(*(range(1 if each in axes else length) for each, length in enumerate(self.shape)))
        own = None
        for first in firsts:
            ranks = [self.ravel(place, self.shape) for place in self.get_coords_along_axis(first, axes, chosen)]
            group = self.get_group(ranks, backend)
            own = group if self.rank in ranks else own
        return own

    create_group_along_axis = get_group_along_axis

    def destroy_mesh_process_groups(self) -> None:
        """Destroys the groups that this mesh made."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


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
