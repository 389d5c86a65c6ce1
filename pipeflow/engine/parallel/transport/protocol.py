"""Transport and Group: the interfaces between the engine and the code that moves tensors; transfers under way; the
group of one rank, and some ranks of a transport as a transport of their own. Must not contain: knowledge of schedules
or of what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeflow.core.errors import Failure, UsageError
from pipeflow.engine.parallel.control.diagnosis import RankPlace


class Work(Protocol):
    """A transfer or a collective under way."""

    def wait(self) -> object:
        """Returns when the tensor has arrived (or left).

        Raises LinkError if the other end is lost or time is up, and any other error if this rank's own tensor is wrong.
        """


class Connection(Protocol):
    """This rank's end of the connections to a peer or to a group."""

    def wait(self, works: Iterable[Work]) -> None:
        """Returns when all `works` are done. Pass the errors it raises to `lost`."""

    def lost(self, error: BaseException) -> BaseException:
        """The error to raise for an error of a start or a wait. It is a LinkError if the channel is broken or time is
        up. Otherwise it is the error itself, which is then about this rank's own tensor.
        """


class Exchange:
    """A Work that starts at once and is waited for alone. Its errors are passed through `link.lost`."""

    __slots__ = ("_link", "_work")

    def __init__(self, link: Connection, start: Callable[..., Work], *arguments: object) -> None:
        self._link = link
        try:
            self._work = start(*arguments)
        except RuntimeError as error:
            raise link.lost(error) from None

    def wait(self) -> None:
        try:
            self._link.wait([self._work])
        except RuntimeError as error:
            raise self._link.lost(error) from None


class LinkError(Exception):
    """The channel to `peer` broke. Reporting it to all ranks finds out why.

    Attributes:
        peer: rank in the world.
        doing: description of what this rank was doing.
        expired: True if this rank gave up waiting.
        why: the message of the underlying error, if there is one.
    """

    def __init__(self, peer: int, doing: str = "exchanging tensors", *, expired: bool = False, why: str = "") -> None:
        super().__init__(f"{doing} (rank {peer}): {why or ('time is up' if expired else 'the channel is closed')}")
        self.peer = peer
        self.doing = doing
        self.expired = expired
        self.why = why

    def story(self, rank: int, timeout: float) -> str:
        """Describes what happened to `rank`, which is this one, whose waits give up after `timeout` seconds."""
        return (
            f"rank {rank} {f'gave up after {timeout:g} s' if self.expired else 'was'} {self.doing} (rank {self.peer})"
        )

    def during(self, doing: str) -> LinkError:
        """The same error with another description of what this rank was doing."""
        return LinkError(self.peer, doing, expired=self.expired, why=self.why)


@contextmanager
def saying(doing: str) -> Iterator[None]:
    """Makes a LinkError raised inside say what this rank was `doing`."""
    try:
        yield
    except LinkError as error:
        raise error.during(doing) from None


def in_collective(ranks: tuple[int, ...]) -> str:
    """Describes a collective of `ranks` in error messages."""
    return f"in a collective of ranks {list(ranks)}"


class Group(Protocol):
    """Ranks that compute collectives together, counted from 0 within the group.

    All of them make the same calls in the same order. Each call starts at once and is done when its Work is. Tensors
    are contiguous and have the same shape and dtype on every rank; rows of `all_to_all` may differ in number. A wait
    raises LinkError if a rank is lost or time is up.
    """

    rank: int
    size: int

    def connect(self) -> None:
        """Connects the ranks, which all call this together; otherwise the first collective connects them. Call it after
        `Transport.connect`, and for several groups in the same order on all ranks. Raises LinkError.
        """

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replaces `tensor` by the sum over the ranks, the same bits on each."""

    def reduce(self, tensor: Tensor, target: int) -> Work:
        """Replaces `tensor` on rank `target` by the sum over the ranks; on others it is undefined afterwards."""

    def all_reduce_max(self, tensor: Tensor) -> Work:
        """Replaces `tensor` by the elementwise maximum over the ranks."""

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        """Fills `whole` with every rank's `part`, one after the other along dim 0."""

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        """Fills `part` with this rank's piece, along dim 0, of the sum of every rank's `whole`."""

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Fills `tensor` with the tensor of rank `source`."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        """Sends the first `send_counts[0]` rows of `sent` to rank 0, the next `send_counts[1]` to rank 1, and so on.
        Fills `received` with the rows of all ranks, those of rank 0 first: `receive_counts[i]` of rank i, which is what
        rank i sends to this one. Rows lie along dim 0, of any number; they have one shape and dtype on every rank.
        """


class Done:
    """Work that is already done, as in a group of one rank."""

    def wait(self) -> None:
        """Returns at once, because the work is complete."""


_DONE = Done()


class Alone:
    """The group of one rank, which exchanges nothing."""

    rank = 0
    size = 1

    def connect(self) -> None:
        """Does nothing, because a single rank needs no connection."""

    def all_reduce(self, tensor: Tensor) -> Work:
        return _DONE

    def reduce(self, tensor: Tensor, target: int) -> Work:
        return _DONE

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return _DONE

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        whole.copy_(part)
        return _DONE

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        part.copy_(whole)
        return _DONE

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return _DONE

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        received.copy_(sent)
        return _DONE


class Unconnected(Alone):
    """One rank of a group that exchanges nothing, for forwards on tensors that have shapes but no values."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        return _DONE

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        return _DONE

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        return _DONE


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

    @property
    def communicator(self) -> Channel:
        """The channel whose communicator of NCCL this one uses. Gradients use that of activations: both ends start
        these in one order. Other tags come between them in another order at each end.
        """
        return self._replace(tag=Tag.ACTIVATION) if self.tag is Tag.GRADIENT else self

    @property
    def turn(self) -> tuple[int, ...]:
        """The place in the order of connecting. Of pairs of ranks that are equally far apart, every second one comes
        first: so many connect at the same time.
        """
        low, apart = min(self.source, self.destination), abs(self.source - self.destination)
        return apart, low // apart % 2, int(self.source > self.destination), self.tag, low

    def require_connected(self, connected: Container[Channel]) -> None:
        """Raises UsageError if this channel needs a connection and has no communicator among those `connected`."""
        if not self.tag.on_host and self.communicator not in connected:
            raise UsageError(
                f"the channel from rank {self.source} to rank {self.destination} for {self.tag.name} is not connected: "
                "both ranks must call connect with it before they send and receive"
            )


def to_connect(channels: Iterable[Channel], connected: Set[Channel]) -> list[Channel]:
    """The communicators of `channels` that are not `connected`, in the order in which all ranks connect."""
    return sorted({each.communicator for each in channels if not each.tag.on_host} - connected, key=lambda it: it.turn)


Start = Callable[[list[Tensor]], Work]
"""Starts to move one tensor, given as a list with one entry. The tensor must be contiguous; the other end must move a
tensor of the same size. The Link of the peer waits for the Work and interprets its errors."""


class Transport(Protocol):
    """The interface of a transport, as the engine uses it."""

    rank: int
    size: int
    device: torch.device
    timeout: float  # seconds
    place: RankPlace  # of this rank, as the others see it
    living: tuple[int, ...]  # the ranks with which channels were opened last: all, unless the world is elastic

    def connect(self, channels: Iterable[Channel]) -> None:
        """Connects those of `channels` that are not connected yet; this rank is an end of each. Returns when they are.

        Both ends of a channel call this before they send and receive, outside of all steps. A channel may be ready only
        when both ends wait for it, as with NCCL. So every rank connects its channels in the order of their turns, one
        after the other: then no ranks wait for each other in a circle, whatever other channels each has. Channels whose
        tag is `on_host` need no connection. Reopening drops all connections. Raises LinkError if another end is lost
        or does not call in time.
        """

    def sender(self, peer: int, tag: Tag) -> Start:
        """The function that sends with `tag` to `peer`. Sending never blocks. Raises UsageError if the channel is not
        connected.
        """

    def receiver(self, peer: int, tag: Tag) -> Start:
        """The function that receives with `tag` from `peer`, in the order in which `peer` sends; tags that share a
        communicator have one order. Raises UsageError like `sender`.
        """

    def link(self, peer: int) -> Connection:
        """The link that waits for transfers with `peer`, of any tag, and interprets their errors."""

    def world_rank(self, peer: int) -> int:
        """The rank of `peer` in the world, for messages to people."""

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> Group:
        """The group of `ranks`, which must include this one; each of them must ask for it. If `on_host`, its tensors
        are in CPU memory, it needs no connection, and it breaks with the channels that are open now.
        """

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


class Subset:
    """The `ranks` of transport `whole`, counted from 0 in the order given; this rank must be one of them.

    A failure concerns the whole transport: all of its ranks are told, and all of its channels are closed.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(whole.rank)
        self.size = len(ranks)
        self.device: torch.device = whole.device
        self.timeout = whole.timeout
        self.place = whole.place
        self.living = tuple(range(len(ranks)))
        self.report, self.enter, self.reopen = whole.report, whole.enter, whole.reopen  # they concern all ranks
        self._whole = whole
        self._ranks = tuple(ranks)

    def world_rank(self, peer: int) -> int:
        return self._whole.world_rank(self._ranks[peer])

    def connect(self, channels: Iterable[Channel]) -> None:
        ranks = self._ranks
        self._whole.connect(Channel(ranks[source], ranks[destination], tag) for source, destination, tag in channels)

    def sender(self, peer: int, tag: Tag) -> Start:
        return self._whole.sender(self._ranks[peer], tag)

    def receiver(self, peer: int, tag: Tag) -> Start:
        return self._whole.receiver(self._ranks[peer], tag)

    def link(self, peer: int) -> Connection:
        return self._whole.link(self._ranks[peer])

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> Group:
        return self._whole.group([self._ranks[rank] for rank in ranks], on_host=on_host)

    def close(self) -> None:
        """Does nothing: the channels belong to the whole transport."""
