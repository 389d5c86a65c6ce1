"""Transport: the interface between the engine and the code that moves tensors. Must not contain: knowledge of schedules
or of what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence, Set
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeflow.core.errors import Failure, UsageError
from pipeflow.parallel.transport.group import Group
from pipeflow.parallel.transport.work import Connection, LinkError, Work


class Tag(IntEnum):
    """The purpose of a transfer. Transfers with one tag between an ordered pair of ranks form a channel, which is a
    FIFO.
    """

    CONTROL = 0  # small agreements between ranks; always in CPU memory
    HEADER = 1  # describes an activation of unknown shape; always in CPU memory
    METADATA = 2  # what a header announces; always in CPU memory
    ACTIVATION = 3
    REDIRECTED = 4  # an activation of another shape than its receiver had posted for
    GRADIENT = 5
    TIED = 6  # gradients and first values of tied weights

    @property
    def on_host(self) -> bool:
        return self <= Tag.METADATA


class Channel(NamedTuple):
    """The transfers from rank `source` to rank `destination` with one tag."""

    source: int
    destination: int
    tag: Tag

    def require_connected(self, connected: Container[Channel]) -> None:
        """Raises UsageError if this channel needs a connection and is not among those that are `connected`."""
        if not self.tag.on_host and self not in connected:
            raise UsageError(
                f"the channel from rank {self.source} to rank {self.destination} for {self.tag.name} is not connected: "
                "both ranks must call connect with it before they send and receive"
            )


def to_connect(channels: Iterable[Channel], connected: Set[Channel]) -> list[Channel]:
    """Those of `channels` that need a connection and are not `connected`, in the order in which all ranks connect."""
    return sorted({channel for channel in channels if not channel.tag.on_host} - connected)


Start = Callable[[list[Tensor]], Work]
"""Starts to move one tensor, given as a list with one entry. The tensor must be contiguous; the other end must move a
tensor of the same size. The Link of the peer waits for the Work and interprets its errors."""


class Transport(Protocol):
    """The interface of a transport, as the engine uses it."""

    rank: int
    size: int
    device: torch.device
    timeout: float  # seconds
    patience: float | None
    """Seconds that others wait at most for this rank while it is in a call that all ranks make together. None between
    such calls: then they wait as long as its process lives."""
    call: object
    """Describes this rank's current call; its string appears in the error if the ranks' calls do not match."""

    def connect(self, channels: Iterable[Channel]) -> None:
        """Connects those of `channels` that are not connected yet; this rank is an end of each. Returns when they are.

        Both ends of a channel call this before they send and receive, outside of all steps. A channel may be ready only
        when both ends wait for it, as with NCCL. So every rank connects its channels in ascending order, one after the
        other: then no ranks wait for each other in a circle, whatever other channels each of them has. Channels whose
        tag is `on_host` need no connection. Reopening drops all connections. Raises LinkError if another end is lost
        or does not call in time.
        """

    def sender(self, peer: int, tag: Tag) -> Start:
        """The function that sends with `tag` to `peer`. Sending never blocks. Raises UsageError if the channel is not
        connected.
        """

    def receiver(self, peer: int, tag: Tag) -> Start:
        """The function that receives with `tag` from `peer`, in the order in which `peer` sends. Raises UsageError like
        `sender`.
        """

    def link(self, peer: int) -> Connection:
        """The link that waits for transfers with `peer`, of any tag, and interprets their errors."""

    def world_rank(self, peer: int) -> int:
        """The rank of `peer` in the world, for messages to people."""

    def group(self, ranks: Sequence[int]) -> Group:
        """The group of `ranks`, which must include this one; each of them must ask for it."""

    def report(self, failure: Failure | LinkError) -> Failure:
        """Reports `failure` to every rank and breaks all channels, which wakes up all waits. For a LinkError, finds its
        cause first. Returns the failure that was reported first, which is the one to raise.
        """

    def enter(self, number: int) -> None:
        """Records that this rank begins call number `number` of those that all ranks make together. A failure in a
        later call breaks no channel of this one, so that this rank can finish a call that others have finished.
        """

    def reopen(self) -> None:
        """Opens channels if there are none, for example after a failure; every rank calls it. Raises LinkError if not
        all ranks join.
        """

    def close(self) -> None:
        """Closes the channels at the end."""
