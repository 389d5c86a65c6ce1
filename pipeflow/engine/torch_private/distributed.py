"""Process groups, the blocks of DTensors, and the files of distributed checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipeflow.engine.torch_private import needed

with needed():
    from torch.distributed.distributed_c10d import _get_default_group as default_group

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


__all__ = [
    "default_group",  # torch.distributed.group.WORLD, which doesn't say that there is none
    "group_names",
    "has_cpu",
    "set_timeout",  # of a group that exists; torch.distributed.set_timeout since torch 2.14
]
