"""The transport over torch.distributed: gloo between CPUs; NCCL between GPUs, with a communicator for each direction
between two ranks, so that a send never queues behind a receive. Headers and agreements always go over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeflow.core.errors import Failure, PipelineError, UsageError
from pipeflow.engine.parallel.control.monitor import Monitor
from pipeflow.engine.parallel.control.rescue import aside
from pipeflow.engine.parallel.transport import nccl
from pipeflow.engine.parallel.transport.agreement import all_gather_object, told_alike
from pipeflow.engine.parallel.transport.channels import Channels, Members, expire, near
from pipeflow.engine.parallel.transport.protocol import (
    Alone,
    Channel,
    Connection,
    Exchange,
    Group,
    LinkError,
    Start,
    Tag,
    Work,
)
from pipeflow.engine.torch_private.distributed import group_names


class DistributedGroup:
    """Ranks as a group. It asks for the `channels` in each call, so that the transport can close and reopen all."""

    def __init__(self, rank: int, members: Members, channels: Callable[[], Channels]) -> None:
        self.rank = members.ranks.index(rank)
        self.size = len(members.ranks)
        self._members = members
        self._channels = channels

    def connect(self) -> None:
        self._channels().collective(self._members)

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._start("allreduce", [tensor])

    def reduce(self, tensor: Tensor, target: int) -> Work:
        return self._start("reduce", tensor, target)

    def all_reduce_max(self, tensor: Tensor) -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self._start("allreduce", [tensor], options)

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        return self._start("_allgather_base", whole, part)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        return self._start("_reduce_scatter_base", part, whole)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start("broadcast", tensor, source)

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        return self._start("alltoall_base", received, sent, list(receive_counts), list(send_counts))

    def _start(self, name: str, *arguments: object) -> Work:
        channels = self._channels()
        group = channels.collective(self._members)
        return Exchange(channels.collective_link(self._members), getattr(group, name), *arguments)


@dataclass(eq=False)
class DistributedTransport:
    """Channels between the processes of a world, and groups of them. `open_first` makes the first channels.

    Args:
        monitor: monitor that is connected to the world's coordinator.
        rank, size: this process's rank in the world, and the world's size.
        device: device of the activations; a CUDA device selects NCCL.
        timeout: seconds after which a wait gives up.
        address: address of this machine for the others.
        leave: function that `close` calls at its end.
    """

    monitor: Monitor
    rank: int
    size: int
    device: torch.device
    timeout: float
    address: str
    leave: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.place = self.monitor.place
        self.living = tuple(range(self.size))
        self._generation = -1  # of the channels that were opened last
        self._channels: Channels | None = None
        self._is_closed = False
        self._is_late = False  # another rank failed in a call that this one comes to next
        self._has_closed_torch_groups = False
        self.monitor.breaks = self._break
        self.monitor.rescue.close = self._close_torch_groups

    def _open(self) -> None:
        self.monitor.open(self._generation)
        try:
            self._channels = Channels(self.monitor, self.address, rank=self.rank, size=self.size, device=self.device)
        except RuntimeError as error:
            raise LinkError(self._next(), "opening channels", why=str(error)) from None
        if self.monitor.must_break(self._generation):  # while they were made
            self._channels.break_all()

    def _break(self, generation: int) -> None:
        """Breaks the channels of this generation. The monitor's thread calls it after a failure."""
        channels = self._channels
        if channels is not None and generation == self._generation:
            channels.break_all()

    def _close_torch_groups(self) -> None:
        """Ends a wait for a collective that pipeflow did not start. To close may block the thread that does it."""
        self._has_closed_torch_groups = True
        aside(close_torch_groups, "pipeflow closing torch's groups")

    def _require_torch_groups(self) -> None:
        """After a failure: raises UsageError on all ranks unless the groups of torch's own still work."""
        told: list[Any] = all_gather_object(self, (self._has_closed_torch_groups, collectives_begun()))
        closed = [rank for rank, (is_closed, _) in enumerate(told) if is_closed]
        unequal = unlike([groups for _, groups in told])
        with told_alike(self):
            if closed:
                raise UsageError(
                    f"rank {closed[0]} closed torch's process groups after the failure, to leave a collective that did "
                    "not end: restart the job"
                )
            if unequal:
                raise UsageError(
                    f"the failure has left torch's process groups at different collectives: {unequal}, which would mix "
                    "up their tensors: restart the job"
                )

    def world_rank(self, peer: int) -> int:
        return peer

    def connect(self, channels: Iterable[Channel]) -> None:
        self.channels.connect(channels)

    def sender(self, peer: int, tag: Tag) -> Start:
        return self.channels.start(Channel(self.rank, peer, tag))

    def receiver(self, peer: int, tag: Tag) -> Start:
        return self.channels.start(Channel(peer, self.rank, tag))

    def link(self, peer: int) -> Connection:
        return self.channels.link(peer)

    @property
    def channels(self) -> Channels:
        """The open channels. Raises LinkError if there are none, after a failure."""
        if self._channels is None or self._channels.is_broken:
            raise LinkError(self._next())
        return self._channels

    def _next(self) -> int:
        """The next living rank."""
        return self.living[(self.living.index(self.rank) + 1) % len(self.living)]

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> Group:
        channels = self.channels if on_host else None
        members = Members(tuple(ranks), on_host)
        return DistributedGroup(self.rank, members, lambda: channels or self.channels) if len(ranks) > 1 else Alone()

    def report(self, failure: Failure | LinkError) -> Failure:
        told = self.monitor.report(self._generation, failure)
        self._close_channels()
        return told

    def enter(self, number: int) -> None:
        self.monitor.enter(number)

    def reopen(self) -> None:
        if self._is_closed:
            raise UsageError("this rank has closed its context: call pipeflow.launch and make a new Pipeline")
        is_late, self._is_late = self._is_late, False  # then there are no channels in this call
        if self._channels is None and not is_late:
            self._generation += 1
            self._open()
            self.living = self.monitor.living
            if self._generation and len(self.living) == self.size:  # torch's groups do not go on without a rank
                self._require_torch_groups()

    def open_first(self) -> None:
        """Opens the first channels, before any call.

        If another rank is further and has failed, the call in which it failed raises that error here, too. Raises
        PipelineError if a rank is gone.
        """
        try:
            self.reopen()
        except LinkError as error:
            failure = self.report(error)
            if failure.number is None:
                raise PipelineError(failure) from None
            self._is_late = True

    def close(self) -> None:
        if self._channels is not None and not self._is_closed:
            self._channels.finish(self.timeout)
        self._is_closed = True
        self.monitor.close()
        channels = self._close_channels()
        if channels is not None:
            channels.settle()
        self.leave()

    def _close_channels(self) -> Channels | None:
        channels, self._channels = self._channels, None
        if channels is not None:
            channels.break_all()
            channels.wait_aborted()
        return channels


# The process groups of torch's own, with which libraries and users compute. Looked at only after a failure.


class Begun(NamedTuple):
    """How many collectives a process has begun in each of its groups.

    Attributes:
        rank: of the process, in torch's world.
        groups: by name, the ranks of the group in torch's world, and the number of collectives.
    """

    rank: int
    groups: dict[str, tuple[tuple[int, ...], int]]


def collectives_begun() -> Begun:
    """The collectives that this process has begun. A group whose backend does not count them is left out."""
    if not dist.is_initialized():
        return Begun(-1, {})
    found, names = {}, group_names()
    for group, backend in _backends():
        with suppress(RuntimeError):
            number = backend._get_sequence_number_for_group()
            found[f"{names[group]}/{backend.name()}"] = (tuple(dist.get_process_group_ranks(group)), number)
    return Begun(dist.get_rank(), found)


def unlike(everyone: Sequence[Begun]) -> str:
    """Names two processes that have begun other numbers of collectives in a group; empty if there are none."""
    numbers = {(each.rank, name): entry for each in everyone for name, entry in each.groups.items()}
    for (rank, name), (members, number) in numbers.items():
        for other in members:
            theirs = numbers.get((other, name), (members, number))
            if theirs != (members, number) and theirs[0] == members:
                return f"rank {rank} has begun {number} collectives, rank {other} {theirs[1]} (ranks {list(members)})"
    return ""


def close_torch_groups() -> None:
    """Closes every group of this process. Whoever waits for a collective gets an error, here and at the other ends."""
    backends = [backend for _, backend in _backends()]
    nccl.abort([backend for backend in backends if backend.name() != "gloo"])
    for backend in backends:
        if backend.name() == "gloo":
            expire(backend, near(backend))


def _backends() -> Iterator[tuple[Any, Any]]:
    """Each group of this process, with each of its backends."""
    for group in group_names():
        if isinstance(group, dist.ProcessGroup):  # not the marker of a group to which this process does not belong
            backends: Any = []
            for device in group._device_types:
                with suppress(RuntimeError):  # none for this device
                    backends.append(group._get_backend(device))
            yield from ((group, backend) for backend in {id(each): each for each in backends}.values())
