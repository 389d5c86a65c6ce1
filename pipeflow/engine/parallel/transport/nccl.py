"""NCCL: makes, connects and closes the process groups through which GPUs exchange tensors. Must not contain: which
groups there are. Tests replace the device type and torch's class by others, as NCCL needs GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeflow.engine.parallel.control.rescue import aside

DEVICE = "cuda"  # the type of devices that NCCL serves
_BLOCKS = 4  # multiprocessors that a transfer occupies while it waits for its peer; several may wait at once
FOREVER = timedelta(days=7)  # the monitor says when time is up; torch counts from when the host starts an operation


def serves(device: torch.device) -> bool:
    """Returns True if tensors on `device` go over NCCL."""
    return device.type == DEVICE


def make(store: dist.Store, rank: int, size: int, *, transfers: bool) -> Any:
    """A group of `size` processes, of which this one is `rank`, for transfers or for collectives. It connects when
    `connect` is called.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = FOREVER
    if transfers:
        options.config.max_ctas = _BLOCKS
        options.config.cga_cluster_size = 0
    return nccl(store, rank, size, options)


def connect(group: Any, device: torch.device, move: Callable[[list[Tensor]], Any]) -> None:
    """Connects `group` and moves one element with `move`, which also connects the operation and loads its kernels.
    Blocks until all ranks of the group do the same.
    """
    torch.get_device_module(device).set_device(device)  # a thread of its own begins with the first device
    group.eager_connect_single_device(device)
    move([torch.zeros(1, device=device)]).wait(FOREVER)  # with a time, the host waits, too


def finish(device: torch.device) -> Future[None]:
    """Begins to wait until `device` has finished its work, such as sends that no code waits for."""
    return aside(partial(torch.get_device_module(device).synchronize, device), "pipeflow finishing")


def abort(groups: Sequence[Any]) -> list[Future[None]]:
    """Begins to abort `groups`, each on its own thread.

    One after the other would hang: an abort may wait for all kernels of the device, and those of the other groups end
    only when these are aborted, too. A group call of NCCL concerns one thread, and torch aborts on threads of its own.
    """
    return [aside(partial(_abort, group), "pipeflow closing") for group in groups]


def _abort(group: Any) -> None:
    with suppress(RuntimeError):
        group.abort()
