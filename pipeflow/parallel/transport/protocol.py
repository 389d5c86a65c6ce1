"""The seam between the engine and what moves tensors. A transport moves; it does not know what or why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from pipeflow.core.errors import Failure
from pipeflow.parallel.transport.group import Group
from pipeflow.parallel.transport.work import Link, LinkError, Work


class Tag(IntEnum):
    """What a transfer is for. Between an ordered pair of ranks, the transfers with one tag are a channel, a FIFO."""

    CONTROL = 0  # small agreements between ranks, always in CPU memory
    HEADER = 1  # of activations whose shape is not known beforehand, always in CPU memory
    METADATA = 2  # what a header announces, always in CPU memory
    ACTIVATION = 3
    REDIRECTED = 4  # an activation that is not what its receiver had posted for
    GRADIENT = 5
    TIED = 6  # gradients and first values of tied weights

    @property
    def on_host(self) -> bool:
        return self <= Tag.METADATA


Start = Callable[[list[Tensor]], Work]
"""Starts to move one tensor, given as a list of one. The tensor must be contiguous; the other end must move one
of the same size. The peer's Link waits for the work, and reads what is raised."""


class Transport(Protocol):
    """What the engine asks of a transport."""

    rank: int
    size: int
    device: torch.device
    timeout: float  # seconds
    patience: float | None
    """How many seconds others wait at most for this rank, while it makes a call that all ranks make together. None
    between such calls: then they wait as long as its process lives."""
    call: object
    """What this rank was asked to do in that call; as a string it is told to all when calls do not match."""

    def sender(self, peer: int, tag: Tag) -> Start:
        """What sends with `tag` to `peer`. Sending never blocks."""

    def receiver(self, peer: int, tag: Tag) -> Start:
        """What receives with `tag` from `peer`, in the order of its sends."""

    def link(self, peer: int) -> Link:
        """What waits for the transfers with `peer`, of whichever tags, and reads their errors."""

    def world_rank(self, peer: int) -> int:
        """What `peer` is called in messages to people: its rank in the world."""

    def group(self, ranks: Sequence[int]) -> Group:
        """What computes together with `ranks`, this one among them; each of them asks for it."""

    def report(self, failure: Failure | LinkError) -> Failure:
        """Tells every rank of `failure` and breaks all channels, so that whoever waits wakes up; of a LinkError finds
        out first what is behind it. Returns the failure that was told first, which is the one to raise.
        """

    def enter(self, number: int) -> None:
        """Tells that this rank begins so many-th call that all ranks make together. A failure in a later call breaks no
        channel before: this rank still ends the one that others have ended.
        """

    def reopen(self) -> None:
        """Makes channels where there are none, as after a failure; every rank calls it. Raises LinkError when not all
        ranks come.
        """

    def close(self) -> None:
        """Gives the channels back at the end."""
