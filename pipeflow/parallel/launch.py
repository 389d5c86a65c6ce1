"""Launch: how a process finds the others and its place among them."""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from pipeflow.parallel.context import Context, set_process_context
from pipeflow.parallel.layout import Layout
from pipeflow.parallel.transport.distributed import DistributedTransport
from pipeflow.parallel.transport.local import Hub, LocalTransport
from pipeflow.parallel.transport.protocol import Transport

_PATIENCE = timedelta(minutes=5)  # processes do not all start at the same moment


def launch(
    pipeline: int | None = None,
    tensor: int = 1,
    *,
    timeout: float = 60.0,
    device: torch.device | str | None = None,
) -> Context:
    """Joins this process to the others and returns its place, which all of its threads see. Tensor ranks are
    neighbours, then come the ranks of a pipeline; what is left of the world are replicas, for data parallelism.

    Reads torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT); without it, this process
    is a world of its own. Initializes torch.distributed's default process group unless that was done.

    Args:
        pipeline: ranks of a pipeline; by default there is one pipeline, through the whole world.
        tensor: processes that share every layer.
        timeout: seconds after which a wait for another rank gives up.
        device: by default this process's own GPU where there is one, else the CPU.

    Raises UsageError, before any process group exists, when the world does not fit.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    layout = Layout.of(world_size, pipeline, tensor)
    place = _device() if device is None else torch.device(device)
    transport: Transport = LocalTransport(Hub(1), 0, device=place, timeout=timeout)
    if world_size > 1:
        transport = _join(rank, world_size, place, timeout)
    context = Context(rank, layout, place, transport)
    set_process_context(context)
    return context


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def _join(rank: int, world_size: int, device: torch.device, timeout: float) -> DistributedTransport:
    """Meets the other processes; rank 0 serves the store on which failures are told and channels are made."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_PATIENCE)
        atexit.register(_leave)
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    meet = partial(dist.TCPStore, host, world_size=world_size, wait_for_workers=False, timeout=_PATIENCE)
    served = meet(port=0, is_master=True) if rank == 0 else None
    port = torch.tensor([0 if served is None else served.port])
    dist.broadcast(port, src=0)
    store = served or meet(port=int(port), is_master=False)
    transport = DistributedTransport(store, rank=rank, size=world_size, device=device, timeout=timeout)
    atexit.register(transport.leave)
    return transport


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
