"""Launch: connects this process to the others and finds its place among them."""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # loaded later, its default arguments would keep the first group alive

from pipeflow.core.errors import Failure, PipelineError, UsageError
from pipeflow.engine.parallel.context import CONTEXT_ATTENTION, Context, set_process_context
from pipeflow.engine.parallel.control.coordinator import Coordinator
from pipeflow.engine.parallel.control.diagnosis import gone
from pipeflow.engine.parallel.control.monitor import HOST, Monitor, grace_of
from pipeflow.engine.parallel.control.rescue import aside
from pipeflow.engine.parallel.device import own_device, prepare
from pipeflow.engine.parallel.failure import write_once
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.rendezvous import (
    RUN_ID,
    address_towards,
    come,
    did_not_come,
    find_each_other,
    missing,
    reachable,
    resolve,
    use_interface_of,
)
from pipeflow.engine.parallel.transport.distributed import DistributedTransport
from pipeflow.engine.parallel.transport.local import Hub, LocalTransport
from pipeflow.engine.parallel.transport.protocol import Transport
from pipeflow.engine.torch_private.distributed import default_group, has_cpu, set_timeout

LOG = logging.getLogger("pipeflow")
T = TypeVar("T")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHORT = 256  # bytes of what the ranks tell each other here
_OF_TORCH = timedelta(minutes=30)  # torch's default for the collectives of its own groups


def launch(
    pipeline: int | None = None,
    tensor: int = 1,
    *,
    context: int = 1,
    context_attention: str = "gather",
    experts: int = 1,
    tensor_mode: str = "1d",
    tensor_depth: int = 1,
    data: int | None = None,
    elastic: bool = False,
    timeout: float = 60.0,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    adaptive: bool = False,
) -> Context:
    """Connects this process to the others and returns its context, which all of its threads see.

    The world is arranged as replicas x pipeline x context x tensor. Tensor ranks are neighbours, then come context
    ranks, then the ranks of a pipeline. Any further processes become data-parallel replicas. Expert ranks are among
    these.

    Reads torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and initializes
    torch.distributed's default process group unless this was done before, also for a world of one process. Without that
    environment, the world is this process alone, which needs no process group. If the default process group exists,
    ranks are those of that group, whatever the environment says.

    Args:
        pipeline: number of ranks in a pipeline; by default all ranks form one pipeline.
        tensor: number of processes that share every layer.
        context: number of processes that hold the same weights and share the tokens of each sequence. They read the
            same batches.
        context_attention: "gather", "ring" or "all_to_all". With "gather", each layer gathers the keys and values of
            all context ranks. With "ring", it has those of one rank at a time, keeps only its own, and sends them again
            in the backward. With "all_to_all", each rank computes the attention of all tokens for some of the heads.
        experts: number of replicas, next to each other, among which the experts of each layer are divided. It divides
            the number of replicas.
        tensor_mode: how tensor ranks share a layer. In "1d" each has columns or rows of a weight, and all activations.
            In "2d" (arXiv 2104.05343) a square of ranks, and in "3d" (arXiv 2105.14450) a cube, divide weights and
            activations. "2.5d" (arXiv 2105.14500) has `tensor_depth` squares with the same weights.
        tensor_depth: number of squares in "2.5d"; `tensor` is r x r x `tensor_depth` then.
        data: number of replicas, to check that as many processes were started; by default as many as fit.
        elastic: whether the job goes on without ranks that die, if their stages are on other replicas. The ranks that
            are left run the step again, with the same batches, as one pipeline.
        timeout: seconds to wait for all ranks to launch, and later for another rank that makes the same call. The limit
            is ten times as long if that rank may have to compile first. There is no limit for a rank between calls, for
            example during a long upload, as long as its process answers. On GPUs it must be longer than a step.
        device: device of this process: "cpu", "cuda" for its own GPU, or another GPU such as "cuda:3". Its own GPU is
            the one of its LOCAL_RANK, or the only visible one. A GPU becomes torch's current device. By default its own
            GPU if there is one, otherwise the CPU.
        group: a process group of torch.distributed. The world is then its ranks alone; other processes need not call.
        adaptive: whether training steps get a better order when they begin to take other times, such as when a rank or
            a link becomes slow. The guide to choosing a schedule says when this gains.

    This sets environment variables that gloo, CUDA, NCCL and torch read (docs/clusters.md lists them). On GPUs, call it
    before CUDA is used.

    Raises UsageError if the world size or the tensor mode does not fit, if `context_attention` is another name, if the
    device does not exist or is not supported, and if CUDA_DEVICE_MAX_CONNECTIONS is less than 32. Also raises it for an
    elastic world that could not go on. No process group exists then. Raises PipelineError if not all ranks launch in
    time; the error names the missing ranks.
    """
    if context_attention not in CONTEXT_ATTENTION:
        raise UsageError(
            f"context_attention must be {' or '.join(map(repr, CONTEXT_ATTENTION))}, got {context_attention!r}"
        )
    rank, world_size = _rank_and_size(group)
    grid: dict[str, Any] = {"tensor_mode": tensor_mode, "tensor_depth": tensor_depth}
    layout = WorldLayout.of(world_size, pipeline, tensor, context, experts, **grid)
    if data not in (None, layout.data):
        replicas = f"{layout.data} replica{'s' * (layout.data > 1)}"
        raise UsageError(
            f"{world_size} processes are {replicas}, not {data}: start {world_size // layout.data * data} processes"
        )
    if elastic:
        _require_elastic(layout, rank)
    if world_size > 1:
        prepare(device)
    place = own_device(device)
    transport: Transport = LocalTransport(Hub(1), 0, device=place, timeout=timeout)
    if world_size > 1:
        transport = _join(rank, world_size, place, timeout, group, elastic=elastic)
        write_once(rank)
    elif not dist.is_initialized() and all(name in os.environ for name in _TORCHRUN):
        _initialize(rank, world_size, place, timeout, lambda *_: None)  # for torch's libraries; nothing here needs it
    launched = Context(rank, layout, place, transport, context_attention, adaptive, elastic)
    set_process_context(launched)
    return launched


def _require_elastic(layout: WorldLayout, rank: int) -> None:
    """Raises UsageError if the ranks that are left could not go on in this layout. Rank 0 warns of a starter that ends
    them.
    """
    for name in ("tensor", "context", "experts", "depth"):
        if (size := getattr(layout, name)) > 1:
            raise UsageError(
                f"elastic=True goes on with pipeline and data ranks alone, and {name} is {size}: launch with {name}=1, "
                "or without elastic=True"
            )
    if layout.data == 1:
        raise UsageError(
            "elastic=True needs replicas, and there is one: if a rank died, nobody would have its stages, and the job "
            "would start again from a checkpoint; launch with data=2 or more, or without elastic=True"
        )
    if rank == 0 and os.environ.get("TORCHELASTIC_RUN_ID", RUN_ID) != RUN_ID:
        LOG.warning(
            "torchrun ends all processes when one of them dies, so elastic=True has no effect: start them with "
            "pipeflow run, or srun --no-kill --kill-on-bad-exit=0"
        )


def _rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank and the number of ranks: in `group`, in torch's default group, or in the environment."""
    if dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _join(
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: float,
    among: dist.ProcessGroup | None,
    *,
    elastic: bool,
) -> DistributedTransport:
    """Connects to the other processes; rank 0 runs the coordinator, to which all ranks connect. In an elastic world
    each rank has one, in case that all before it die.
    """
    coordinators: list[Coordinator] = []

    def tell(address: str, group: dist.ProcessGroup | None) -> tuple[bytes, str, list[tuple[str, int]]]:
        own, port, grace = address_towards(address), 0, grace_of(timeout)
        if rank == 0 or elastic:
            coordinators.append(Coordinator(own, world_size, secrets.token_bytes(32), grace, elastic=elastic))
            port = coordinators[0].port
        secret = coordinators[0].secret.hex() if rank == 0 else ""
        everyone = _gathered([secret, own if rank else address, port], world_size, group)
        for each in coordinators:
            each.secret = bytes.fromhex(everyone[0][0])
        address = everyone[0][1]
        return bytes.fromhex(everyone[0][0]), address, [(where, at) for _, where, at in everyone if at]

    secret, address, hosts = _initialize(rank, world_size, device, timeout, tell, among)
    try:
        first, *others = hosts
        monitor = Monitor(*first, rank=rank, size=world_size, secret=secret, timeout=timeout, others=others)
    except OSError:
        raise PipelineError(gone(HOST)) from None
    leave = coordinators[0].close if coordinators else lambda: None
    transport = DistributedTransport(monitor, rank, world_size, device, timeout, address_towards(address), leave)
    atexit.register(transport.close)
    transport.open_first()
    return transport


def _initialize(
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: float,
    then: Callable[[str, dist.ProcessGroup | None], T],
    among: dist.ProcessGroup | None = None,
) -> T:
    """Makes torch's default process group unless there is one, and returns `then(address, group)`, where `address` is
    that of rank 0's machine, and `group` exchanges tensors in CPU memory between the ranks of `among`.
    """
    if dist.is_initialized():
        group = _group_of_cpus(timeout, among)
        return then(_address_of_rank_0(rank, world_size, group, whole=among is None), group)
    store, address = find_each_other(rank, world_size, timeout)
    use_interface_of(address_towards(address))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience, until = timedelta(seconds=timeout), time.monotonic() + timeout + grace_of(timeout)

    def meet() -> T:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
        result = then(address, None)  # no rank passes this before all have reached it
        come(store, rank)
        return result

    try:
        result = aside(meet, "pipeflow launch").result(timeout)
    except (RuntimeError, TimeoutError) as error:
        if absent := missing(store, rank, world_size, until):
            raise did_not_come(absent, timeout) from None
        raise PipelineError(Failure(rank, f"it found all ranks, but could not connect to them: {error!r}")) from None
    set_timeout(_OF_TORCH)
    atexit.register(_leave)
    return result


def _group_of_cpus(timeout: float, among: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`among`, where None stands for torch's default process group; or another group of its ranks if it only moves
    tensors of GPUs, as after `init_process_group("nccl")`. It stays open: to close it would break it for a rank that
    still reads from it.
    """
    if has_cpu(among or default_group()):
        return among
    if named := os.environ.get("MASTER_ADDR"):
        use_interface_of(address_towards(resolve(named)))
    ranks = None if among is None else dist.get_process_group_ranks(among)
    group: dist.ProcessGroup = dist.new_group(
        ranks, timedelta(seconds=timeout), backend="gloo", use_local_synchronization=among is not None
    )
    return group


def _address_of_rank_0(rank: int, world_size: int, group: dist.ProcessGroup | None, *, whole: bool) -> str:
    """The address at which all ranks reach rank 0's machine, which may know its own name as a loopback address only.
    Unless the group is the `whole` world, MASTER_ADDR may be another machine, and rank 0 tells its address towards it.
    """
    named = os.environ.get("MASTER_ADDR") or (socket.gethostname() if rank == 0 else "")
    address = resolve(named) if named and (whole or rank == 0) else ""
    told = _gathered(address if whole or not address else address_towards(address), world_size, group)
    return reachable([address for address in told if address])


def _gathered(value: object, world_size: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, which is short and plain, in rank order. Sent through torch's group rather than its store,
    which anybody can read.
    """
    mine = torch.frombuffer(bytearray(json.dumps(value).encode().ljust(_SHORT)), dtype=torch.uint8)
    seen = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(seen, mine, group=group)
    return [json.loads(bytes(each.tolist())) for each in seen]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
