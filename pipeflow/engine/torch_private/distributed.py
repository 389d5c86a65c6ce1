"""Process groups, the blocks of DTensors, the files of distributed checkpoints, and parameters under fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipeflow.engine.torch_private import needed

with needed():
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.distributed_c10d import _get_default_group as default_group
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    set_timeout: Callable[..., None] = (
        torch.distributed.set_timeout
        if hasattr(torch.distributed, "set_timeout")  # since torch 2.14
        else torch.distributed.distributed_c10d._set_pg_timeout
    )


def group_names() -> dict[torch.distributed.ProcessGroup, str]:
    """The names of this process's groups. Public functions name one group."""
    with needed():
        return {**torch.distributed.distributed_c10d._world.pg_names}


def has_cpu(group: Any) -> bool:
    """Whether a process group has a backend for tensors of the CPU. Nothing public says so."""
    return torch.device("cpu") in group._device_types


def drop_gradients(parameter: Any) -> None:
    """Drops what an FSDPParam has accumulated of gradients of the whole parameter. Nothing public does."""
    if "unsharded_accumulated_grad" in vars(parameter):  # before torch 2.15
        parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):  # made by the first gather
        parameter._unsharded_param.grad = None


__all__ = [
    "StorageInfo",  # where a tensor is in the files of a checkpoint: the metadata of a checkpoint has its objects
    "compute_local_shape_and_global_offset",  # of a DTensor's block; nothing public says it for every placement
    "default_group",  # torch.distributed.group.WORLD, which doesn't say that there is none
    "drop_gradients",
    "group_names",
    "has_cpu",
    "set_timeout",  # of a group that exists; torch.distributed.set_timeout since torch 2.14
]
