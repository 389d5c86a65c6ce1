"""Replay: what the ranks issued, run again under NCCL's rules. Must not contain: how it was recorded.

Theory of operation
===================

A rank has a *host*, which issues, and a device with streams, which run what was issued. Four facts make a program that
runs over gloo deadlock over NCCL:

1. *A communicator is a stream.* ProcessGroupNCCL gives each communicator one stream. Operations on it run one after the
   other, in the order in which this rank issued them, whatever is sent and by whom. The order of streams among each
   other is free.
2. *Nothing is buffered.* A send is a kernel that ends with its receive, and a receive one that ends with its send; a
   collective ends when the kernels of all its ranks run. (NCCL has small buffers. No program may rely on them.)
3. *An operation comes after the computations that were issued before it.* ProcessGroupNCCL records an event of the
   current stream, and the communicator's stream waits for it. In turn, `Work.wait()` makes the current stream wait for
   the operation; the host goes on. So a receive whose wait has been issued holds up every later operation of its rank,
   whichever communicator it is on.
4. *The first use of a communicator is a rendezvous of the hosts.* It exchanges an id and opens connections, and returns
   when all of its ranks have come. Later uses only enqueue. A rank can be at one first use only, so ranks that come to
   them in different orders may wait for each other. To connect a communicator before it is used is such a rendezvous,
   too, with an exchange of one element for which the hosts wait.

The host itself waits where it needs a value: for a transfer in CPU memory (gloo), for a number on the device (`item`,
a copy), or for the whole device.

A fifth rule holds if a device has few *hardware queues* (CUDA_DEVICE_MAX_CONNECTIONS). Streams are dealt to the queues
in turn, and the head of a queue that cannot start yet holds up what is behind it, of other streams, too. `queues=1`
means that all kernels of a rank start in the order in which they were issued. Once started, a kernel holds up its own
stream alone.

A computation ends by itself, so it matters only as something that must start; nothing here has a duration. Whether a
program deadlocks then does not depend on speeds: every rule says what must have happened *before* something may happen,
nothing is ever taken back, and no two things exclude each other. So what can happen will happen, in any order, and
`replay` lets things happen until nothing can. What is left is stuck in every run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from pipeflow.engine.parallel.transport.protocol import Channel, Tag


class Communicator(NamedTuple):
    """Ranks that share a stream each. For transfers: the source, the destination, and a tag."""

    ranks: tuple[int, ...]
    name: str

    def __str__(self) -> str:
        return f"{'->'.join(map(str, self.ranks))} {self.name}"


class Exchange(NamedTuple):
    """The n-th operation on a channel or of a group: a send with its receive, or a collective."""

    channel: Communicator
    number: int

    def __str__(self) -> str:
        return f"{self.channel} #{self.number}"


class Connect(NamedTuple):
    """The host meets the others, and opens a communicator."""

    communicator: Communicator


class Start(NamedTuple):
    """The host enqueues this rank's end of an exchange; in CPU memory (over gloo) if `on_host`."""

    exchange: Exchange
    on_host: bool = False


class Wait(NamedTuple):
    """The computations after this wait for an exchange; the host itself does if that is in CPU memory."""

    exchange: Exchange
    on_host: bool = False


class Compute(NamedTuple):
    """The host enqueues computations."""


class Synchronize(NamedTuple):
    """The host waits for all computations before, and if `everything` for the communicators' streams, too."""

    why: str
    everything: bool = False


Issued: TypeAlias = Connect | Start | Wait | Compute | Synchronize
Log: TypeAlias = Sequence[Issued]
"""What one rank issued, in order."""


class DeadlockError(Exception):
    """Nothing can happen any more. `circle` has who waits for whom, each waiting for the next, the last for the first;
    `stuck` what each host waits for.
    """

    def __init__(self, circle: Sequence[str], stuck: Sequence[str]) -> None:
        super().__init__("\n".join(["nothing can happen any more:", *stuck, "in a circle:", *circle]))
        self.circle = circle
        self.stuck = stuck


def replay(
    logs: Sequence[Log], *, queues: int | None = None, shared: Callable[[Communicator], Communicator] | None = None
) -> None:
    """Runs the logs of all ranks. Raises DeadlockError.

    Args:
        logs: by rank.
        queues: number of hardware queues of a device; None for as many as streams.
        shared: the communicator on which the exchanges of a channel run; by default each channel has its own.
    """
    world = _World([_Rank(rank, log, queues, shared or (lambda channel: channel)) for rank, log in enumerate(logs)])
    while sum(rank.advance(world) for rank in world.ranks):
        pass
    if any(not rank.is_done for rank in world.ranks):
        raise world.deadlock()


@dataclass(eq=False)
class _Item:
    """Something on a stream. It starts after all of `after` have ended; computations and waits end as they start, an
    exchange ends when it has started on all of its ranks.
    """

    rank: int
    text: str
    after: list[_Item]
    exchange: Exchange | None = None
    behind: _Item | None = None  # the one before it in its hardware queue, which must have started
    started: bool = False
    ended: bool = False

    def may_start(self) -> bool:
        return all(item.ended for item in self.after)


class _World:
    """What all ranks see of each other."""

    def __init__(self, ranks: list[_Rank]) -> None:
        self.ranks = ranks
        self.came: dict[Communicator, set[int]] = defaultdict(set)  # to its first use
        self.posted: dict[Exchange, set[int]] = defaultdict(set)  # in CPU memory
        self.ends: dict[Exchange, dict[int, _Item]] = defaultdict(dict)

    def start(self, item: _Item) -> None:
        item.started = True
        ends = {} if item.exchange is None else self.ends[item.exchange]
        if item.exchange is None:
            item.ended = True
        elif len(ends) == len(item.exchange.channel.ranks) and all(end.started for end in ends.values()):
            for end in ends.values():
                end.ended = True

    def deadlock(self) -> DeadlockError:
        """Follows who waits for whom, until it comes back."""
        stuck = [rank.text() for rank in self.ranks if not rank.is_done]
        node: _Rank | _Item | None = next(rank for rank in self.ranks if not rank.is_done)
        path: list[_Rank | _Item] = []
        while node is not None and node not in path:
            path.append(node)
            node = node.awaits(self) if isinstance(node, _Rank) else self._awaited_by(node)
        circle = path if node is None else path[path.index(node) :]
        return DeadlockError([each.text() if isinstance(each, _Rank) else each.text for each in circle], stuck)

    def _awaited_by(self, item: _Item) -> _Rank | _Item | None:
        """What a device's item waits for: one before it, the other end, or the host that does not issue that."""
        if not item.started:
            waits = [each for each in item.after if not each.ended]
            return waits[0] if waits else item.behind
        assert item.exchange is not None
        ends = self.ends[item.exchange]
        for peer in item.exchange.channel.ranks:
            if peer not in ends:
                return self.ranks[peer]
            if not ends[peer].started:
                return ends[peer]
        return None


@dataclass(eq=False)
class _Rank:
    """One rank: its host, at `position` of its log, and the items of its streams that have not started."""

    rank: int
    log: Log
    queues: int | None
    shared: Callable[[Communicator], Communicator]
    position: int = 0
    computed: _Item | None = None  # the last item of the stream of computations
    last: dict[Communicator, _Item] = field(default_factory=dict)  # of each communicator's stream
    waiting: dict[int, deque[_Item]] = field(default_factory=lambda: defaultdict(deque))  # by hardware queue
    numbers: dict[Communicator | None, int] = field(default_factory=dict)  # of the streams

    @property
    def is_done(self) -> bool:
        return self.position == len(self.log) and self._is_idle()

    def _is_idle(self) -> bool:
        return all(item.ended for item in (*filter(None, [self.computed]), *self.last.values()))

    def advance(self, world: _World) -> bool:
        """Lets the host go as far as it can, and every item start that may. Returns whether anything happened."""
        before = self.position
        while self.position < len(self.log) and self._issue(self.log[self.position], world):
            self.position += 1
        happened = self.position > before
        for queue in self.waiting.values():
            while queue and queue[0].may_start():
                world.start(queue.popleft())
                happened = True
        return happened

    def _issue(self, issued: Issued, world: _World) -> bool:
        """Returns False if the host must wait."""
        match issued:
            case Connect(channel):
                return self._connect(self.shared(channel), world)
            case Start(exchange, on_host=True):
                world.posted[exchange].add(self.rank)
            case Wait(exchange, on_host=True):
                return len(world.posted[exchange]) == len(exchange.channel.ranks)
            case Start(exchange):
                communicator = self.shared(exchange.channel)
                if not self._meet(communicator, world):
                    return False
                self._exchange(exchange, communicator, world)
            case Wait(exchange):
                self._compute(f"rank {self.rank}'s computations after {exchange}", world.ends[exchange][self.rank])
            case Compute():
                self._compute(f"rank {self.rank}'s computations")
            case Synchronize(_, everything):
                return self._is_idle() if everything else self.computed is None or self.computed.ended
        return True

    def _connect(self, communicator: Communicator, world: _World) -> bool:
        first = _first(communicator)
        if not self._meet(communicator, world):
            return False
        if self.rank not in world.ends[first]:
            self._exchange(first, communicator, world)
        return world.ends[first][self.rank].ended

    def _exchange(self, exchange: Exchange, communicator: Communicator, world: _World) -> None:
        after = [*filter(None, [self.last.get(communicator), self.computed])]
        item = _Item(self.rank, f"rank {self.rank}'s end of {exchange}", after, exchange)
        self.last[communicator] = world.ends[exchange][self.rank] = self._enqueue(communicator, item)

    def _meet(self, communicator: Communicator, world: _World) -> bool:
        came = world.came[communicator]
        came.add(self.rank)
        return len(came) == len(communicator.ranks)

    def _compute(self, text: str, *after: _Item) -> None:
        self.computed = self._enqueue(None, _Item(self.rank, text, [*filter(None, [self.computed]), *after]))

    def _enqueue(self, stream: Communicator | None, item: _Item) -> _Item:
        number = self.numbers.setdefault(stream, len(self.numbers))
        queue = self.waiting[number if self.queues is None else number % self.queues]
        item.behind = queue[-1] if queue else None
        queue.append(item)
        return item

    def awaits(self, world: _World) -> _Rank | _Item | None:
        """What the host waits for."""
        missing: set[int] = set()
        match self.log[self.position] if self.position < len(self.log) else None:
            case Connect(channel) | Start(Exchange(channel)):
                communicator = self.shared(channel)
                missing = set(communicator.ranks) - world.came[communicator]
                if not missing:
                    return world.ends[_first(communicator)][self.rank]
            case Wait(exchange):
                missing = set(exchange.channel.ranks) - world.posted[exchange]
        if missing:
            return world.ranks[min(missing)]
        return next((item for item in (self.computed, *self.last.values()) if item and not item.ended), None)

    def text(self) -> str:
        """Where the host is."""
        match self.log[self.position] if self.position < len(self.log) else None:
            case None:
                return f"rank {self.rank}'s host has issued everything"
            case Connect(channel):
                return f"rank {self.rank}'s host connects {self.shared(channel)}"
            case Start(Exchange(channel)):
                return f"rank {self.rank}'s host is at the first use of {self.shared(channel)}"
            case Wait(exchange):
                return f"rank {self.rank}'s host waits for {exchange}"
            case Synchronize(why):
                return f"rank {self.rank}'s host waits for its device: {why}"
            case Compute():
                return f"rank {self.rank}'s host computes"


def _first(communicator: Communicator) -> Exchange:
    """What is exchanged as soon as a communicator is connected."""
    return Exchange(communicator, -1)


def circle_of_connections(logs: Sequence[Log]) -> list[Communicator]:
    """Communicators that ranks connect in orders that contradict each other; empty if there is an order of all."""
    sorter: TopologicalSorter[Communicator] = TopologicalSorter()
    for log in logs:
        order = list(dict.fromkeys(each.communicator for each in log if isinstance(each, Connect)))
        for first, second in pairwise(order):
            sorter.add(second, first)
    try:
        sorter.prepare()
    except CycleError as error:
        circle: list[Communicator] = error.args[1]
        return circle
    return []


def without_connecting(log: Log) -> list[Issued]:
    """The log without connecting: communicators connect at their first use."""
    return [each for each in log if not isinstance(each, Connect)]


def used(log: Log) -> list[Communicator]:
    """The communicators of a log, in the order of their first use."""
    return list(dict.fromkeys(each.exchange.channel for each in log if isinstance(each, Start) and not each.on_host))


def connected_in_order_of_use(log: Log) -> list[Issued]:
    """The log with all its communicators connected first, in the order in which this rank uses them."""
    return [*map(Connect, used(log)), *without_connecting(log)]


def as_engine(channel: Communicator) -> Communicator:
    """The communicator on which the engine runs a channel."""
    if channel.name not in Tag.__members__:
        return channel
    source, destination = channel.ranks
    return channel._replace(name=Channel(source, destination, Tag[channel.name]).communicator.tag.name)


def per_pair(channel: Communicator) -> Communicator:
    """One communicator for all that two ranks send each other."""
    return channel if len(channel.ranks) > 2 else Communicator((min(channel.ranks), max(channel.ranks)), "all")
