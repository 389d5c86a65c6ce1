"""The in-process transport: the ranks are threads of one process. For debugging, for fast tests, for several stages on
one GPU, and for a pipeline of a single rank. In a group, the last rank to arrive computes for all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, get_ident

import torch
from torch import Tensor

from pipeflow.core.errors import Failure
from pipeflow.engine.parallel.control.diagnosis import (
    AGAIN,
    RankPlace,
    Status,
    diagnose,
    gone,
    in_wait,
    left,
    mismatch,
)
from pipeflow.engine.parallel.transport.protocol import (
    Alone,
    Channel,
    Connection,
    Group,
    LinkError,
    Start,
    Tag,
    Work,
    in_collective,
    saying,
    to_connect,
)

_SOON = 0.1  # seconds after which a rank that suspects others compares its call with theirs

Inputs = list[tuple[Tensor, ...]]  # per rank of the group, the tensors that its call was given


@dataclass(eq=False)
class Collective:
    """One collective under way, with the inputs of the ranks that have arrived."""

    inputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    ready: list[torch.cuda.Event] = field(default_factory=list)
    done: bool = False
    computed: torch.cuda.Event | None = None

    def compute(self, what: Callable[[Inputs], None]) -> None:
        """Called by the last rank to arrive; on a GPU, its stream first waits for the others' streams."""
        for event in self.ready:
            torch.cuda.current_stream().wait_event(event)
        with torch.inference_mode():  # inference mode may write into its own tensors and into all others
            what([self.inputs[rank] for rank in range(len(self.inputs))])
        self.inputs.clear()
        if self.ready:
            self.computed = torch.cuda.current_stream().record_event()
        self.done = True


class Hub:
    """The state that the threads of a world share: through it they wait for each other.

    Args:
        size: number of ranks.
        elastic: whether the ranks that are left open channels when others have died.
    """

    def __init__(self, size: int, *, elastic: bool = False) -> None:
        self.size = size
        self.elastic = elastic
        self.died: set[int] = set()
        self.arrived: defaultdict[int, set[int]] = defaultdict(set)  # by generation, in an elastic world
        self.opened: dict[int, tuple[int, ...]] = {}  # by generation, the ranks that have opened it together
        self.changed = Condition()
        # by generation, source, destination and tag: transfers that only the sender, or the receiver, has started
        self.channels: dict[tuple[int, int, int, Tag], tuple[deque[_Transfer], deque[_Transfer]]]
        self.channels = defaultdict(lambda: (deque(), deque()))
        self.failures: dict[int, Failure] = {}  # by generation
        # by generation, ranks, whether in CPU memory, and number
        self.collectives: dict[tuple[int, tuple[int, ...], bool, int], Collective] = {}
        self.closed: set[tuple[int, int]] = set()  # (generation, rank) of ranks that know of a failure
        self.gone: set[int] = set()
        self.waits_for: dict[tuple[int, int], tuple[int, ...]] = {}  # by rank and thread: threads of a trace wait, too
        self.places = [RankPlace() for _ in range(size)]  # by rank
        self.blames: dict[tuple[int, int], Failure] = {}  # by generation and by the rank that gave up

    def wait(self, by: LocalTransport, generation: int, ranks: tuple[int, ...], done: Callable[[], bool]) -> None:
        """Waits, as rank `by` and with `changed` held, until `done()` or a rank of `ranks` has closed its channels.
        Raises LinkError.
        """
        waited, here = 0.0, (by.rank, get_ident())
        pause = min(_SOON, by.timeout) if by.place.suspects else by.timeout
        self.waits_for[here] = ranks
        try:
            while not self.changed.wait_for(lambda: done() or self._closed(generation, ranks), pause):
                waited += pause
                if waited < by.timeout:
                    blame = mismatch(by.place.number, self.statuses())
                else:
                    blame, pause = diagnose(by.rank, waited, self.statuses()), AGAIN * by.timeout
                if blame:
                    self.blames[generation, by.rank] = blame
                    raise LinkError(ranks[0], expired=True)
        finally:
            del self.waits_for[here]
        if not done():
            raise LinkError(self._closed(generation, ranks)[0])

    def open(self, by: LocalTransport, generation: int) -> tuple[int, ...]:
        """Waits, as rank `by`, until all ranks that have not died open the generation; returns them. Raises LinkError
        for one that has left.
        """
        with self.changed:
            self.arrived[generation].add(by.rank)
            self.changed.notify_all()

            def done() -> bool:
                living = set(range(self.size)) - self.died
                if self.arrived[generation] >= living:
                    self.opened.setdefault(generation, tuple(sorted(living)))
                return generation in self.opened or bool(self.gone & living)

            self.changed.wait_for(done, by.timeout)
            if generation not in self.opened:
                missed = set(range(self.size)) - self.died - self.arrived[generation]
                raise LinkError(min(missed | self.gone - self.died), "opening channels", expired=True)
            return self.opened[generation]

    def require_open(self, generation: int, ranks: tuple[int, ...]) -> None:
        """Raises LinkError if a rank of `ranks` has closed its channels."""
        for rank in self._closed(generation, ranks):
            raise LinkError(rank)

    def _closed(self, generation: int, ranks: tuple[int, ...]) -> list[int]:
        return [rank for rank in ranks if (generation, rank) in self.closed]

    def statuses(self) -> dict[int, Status | Failure]:
        """The status of every rank, as in `diagnose`."""
        return {
            rank: left(rank) if rank in self.gone else place.status(self._awaited_by(rank))
            for rank, place in enumerate(self.places)
            if rank not in self.died
        }

    def _awaited_by(self, rank: int) -> tuple[int, ...]:
        return tuple(other for (waiting, _), ranks in self.waits_for.items() if waiting == rank for other in ranks)


class LocalGroup:
    """The `ranks` of a transport as a group; they are threads of this process."""

    def __init__(self, transport: LocalTransport, ranks: tuple[int, ...], *, on_host: bool = False) -> None:
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self._ranks = ranks
        self._on_host = on_host
        self._transport = transport
        self._count = 0  # number of this rank's calls
        self._generation = transport.generation

    def connect(self) -> None:
        """Does nothing; threads need no connection."""

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._join(_sum, tensor)

    def reduce(self, tensor: Tensor, target: int) -> Work:
        return self._join(partial(_reduce, target), tensor)

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return self._join(_maximum, tensor)

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        _require_pieces(whole, part, self.size)
        return self._join(_gather, whole, part)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        _require_pieces(whole, part, self.size)
        return self._join(_scatter, part, whole)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        def copy(inputs: Inputs) -> None:
            for [target] in inputs:
                target.copy_(inputs[source][0])

        return self._join(copy, tensor)

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        return self._join(_swap, *received.split(list(receive_counts)), *sent.split(list(send_counts)))

    def _join(self, what: Callable[[Inputs], None], *tensors: Tensor) -> Work:
        transport, hub = self._transport, self._transport.hub
        if self._generation != transport.generation and not self._on_host:
            self._generation, self._count = transport.generation, 0
        key = (self._generation, self._ranks, self._on_host, self._count)
        self._count += 1
        with hub.changed, saying(in_collective(self._ranks)):
            hub.require_open(self._generation, self._ranks)
            collective = hub.collectives.setdefault(key, Collective())
            collective.inputs[self.rank] = tensors
            if tensors[0].is_cuda:
                collective.ready.append(torch.cuda.current_stream().record_event())
            if len(collective.inputs) == self.size:
                del hub.collectives[key]
                collective.compute(what)
                hub.changed.notify_all()
        return _CollectiveWork(transport, self._generation, collective, self._ranks)


@dataclass(slots=True, eq=False)
class _CollectiveWork:
    """A rank's end of a collective."""

    transport: LocalTransport
    generation: int
    collective: Collective
    ranks: tuple[int, ...]

    def wait(self) -> None:
        transport, collective = self.transport, self.collective
        others = tuple(rank for rank in self.ranks if rank != transport.rank)
        with transport.hub.changed, saying(in_collective(self.ranks)):
            transport.hub.wait(transport, self.generation, others, lambda: collective.done)
        if collective.computed is not None:
            torch.cuda.current_stream().wait_event(collective.computed)


def _require_pieces(whole: Tensor, part: Tensor, size: int) -> None:
    if whole.shape != (size * part.shape[0], *part.shape[1:]):
        raise ValueError(f"{size} pieces of {tuple(part.shape)} along dim 0 do not make up {tuple(whole.shape)}")


def _sum(inputs: Inputs) -> None:
    total = _summed([tensor for [tensor] in inputs])
    for [tensor] in inputs:
        tensor.copy_(total)


def _reduce(target: int, inputs: Inputs) -> None:
    inputs[target][0].copy_(_summed([tensor for [tensor] in inputs]))


def _summed(tensors: Sequence[Tensor]) -> Tensor:
    """The sum, added up in rank order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _maximum(inputs: Inputs) -> None:
    total = torch.stack([tensor for [tensor] in inputs]).amax(dim=0)
    for [tensor] in inputs:
        tensor.copy_(total)


def _gather(inputs: Inputs) -> None:
    everything = torch.cat([part for _, part in inputs])
    for whole, _ in inputs:
        whole.copy_(everything)


def _scatter(inputs: Inputs) -> None:
    total = _summed([whole for _, whole in inputs])
    for (part, _), piece in zip(inputs, total.chunk(len(inputs)), strict=True):
        part.copy_(piece)


def _swap(inputs: Inputs) -> None:
    size = len(inputs)
    for rank, parts in enumerate(inputs):
        for source, target in enumerate(parts[:size]):
            piece = inputs[source][size + rank]
            if piece.shape != target.shape:
                raise ValueError(
                    f"rank {rank} of the group expects {tuple(target.shape)} from rank {source}, which sends "
                    f"{tuple(piece.shape)}: the receive_counts of each rank must be what the others send to it"
                )
            target.copy_(piece)


class _Transfer:
    """One end of a transfer: done when the tensor has been copied from the sender's to the receiver's memory."""

    def __init__(self, transport: LocalTransport, peer: int, tensor: Tensor) -> None:
        self.transport = transport
        self.generation = transport.generation
        self.peer = peer
        self.tensor = tensor  # kept until the engine drops this work
        self.done = False
        self.ready = _record(tensor)  # on a GPU: an event after which the tensor may be read or written
        self.copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        transport = self.transport
        with transport.hub.changed:
            transport.hub.wait(transport, self.generation, (self.peer,), lambda: self.done)
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


def _record(tensor: Tensor) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


class _Link:
    """The link to any peer: transfers between threads know whom they wait for, and raise the right error themselves."""

    def wait(self, works: Iterable[Work]) -> None:
        for work in works:
            work.wait()

    def lost(self, error: BaseException) -> BaseException:
        return error


_LINK = _Link()


class LocalTransport:
    """Channels between the threads that share `hub`; on a GPU each rank copies on a stream of its own.

    Args:
        hub: shared by all ranks.
        rank: rank of this thread.
        device: device of the activations; by default the CPU.
        timeout: seconds after which a wait gives up.
    """

    def __init__(self, hub: Hub, rank: int, *, device: torch.device | None = None, timeout: float = 60.0) -> None:
        self.rank = rank
        self.size = hub.size
        self.device = torch.device("cpu") if device is None else device
        self.timeout = timeout
        self.hub = hub
        self.generation = 0  # counts the reopenings
        self.living = tuple(range(hub.size))
        self.place = hub.places[rank]
        self._connected: set[Channel] = set()
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def world_rank(self, peer: int) -> int:
        return peer

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> Group:
        return LocalGroup(self, tuple(ranks), on_host=on_host) if len(ranks) > 1 else Alone()

    def connect(self, channels: Iterable[Channel]) -> None:
        """Records `channels`; threads need no connection."""
        self._connected.update(to_connect(channels, self._connected))

    def sender(self, peer: int, tag: Tag) -> Start:
        Channel(self.rank, peer, tag).require_connected(self._connected)
        return partial(self._start, (self.generation, self.rank, peer, tag), True)

    def receiver(self, peer: int, tag: Tag) -> Start:
        Channel(peer, self.rank, tag).require_connected(self._connected)
        return partial(self._start, (self.generation, peer, self.rank, tag), False)

    def link(self, peer: int) -> Connection:
        return _LINK

    def _start(self, key: tuple[int, int, int, Tag], sending: bool, tensors: list[Tensor]) -> _Transfer:
        generation, source, destination, _ = key
        if not tensors[0].is_contiguous():
            raise RuntimeError("the tensor must be contiguous")  # as between processes
        transfer = _Transfer(self, destination if sending else source, tensors[0])
        with self.hub.changed:
            if (generation, transfer.peer) in self.hub.closed:
                raise LinkError(transfer.peer)
            sends, receives = self.hub.channels[key]
            mine, other = (sends, receives) if sending else (receives, sends)
            if not other:
                mine.append(transfer)
                return transfer
            match = other.popleft()
            self._copy(*((transfer, match) if sending else (match, transfer)))
            self.hub.changed.notify_all()
        return transfer

    def _copy(self, source: _Transfer, target: _Transfer) -> None:
        if source.tensor.shape != target.tensor.shape or source.tensor.dtype != target.tensor.dtype:
            sent, expected = tuple(source.tensor.shape), tuple(target.tensor.shape)
            raise RuntimeError(f"sent a tensor of shape {sent}, expected {expected}")
        if self._stream is not None and source.ready is not None and target.ready is not None:
            self._stream.wait_event(source.ready)
            self._stream.wait_event(target.ready)
            with torch.cuda.stream(self._stream), torch.inference_mode():
                target.tensor.copy_(source.tensor, non_blocking=True)
            source.copied = target.copied = self._stream.record_event()
        else:
            with torch.inference_mode():  # inference mode may write into its own tensors and into all others
                target.tensor.copy_(source.tensor)
        source.done = target.done = True

    def report(self, failure: Failure | LinkError) -> Failure:
        with self.hub.changed:
            if isinstance(failure, LinkError):
                blame = self.hub.blames.get((self.generation, self.rank)) or Failure(
                    failure.peer, "it closed its channels"
                )
                failure = in_wait(blame, failure.story(self.rank, self.timeout))
            elif failure.number is not None and (found := mismatch(failure.number, self.hub.statuses())):
                failure = failure.following(found.rank, found.reason)
            first = self.hub.failures.setdefault(self.generation, failure)
            self._break()
        return first

    def _break(self) -> None:
        self.hub.closed.add((self.generation, self.rank))
        for key in [key for key in self.hub.channels if key[0] == self.generation and self.rank in key[1:3]]:
            del self.hub.channels[key]
        for each in [each for each in self.hub.collectives if each[0] == self.generation and self.rank in each[1]]:
            del self.hub.collectives[each]
        self.hub.changed.notify_all()

    def die(self) -> None:
        """Makes this rank one whose process is gone, for tests. Its thread must end without another call."""
        with self.hub.changed:
            self.hub.died.add(self.rank)
            self.hub.failures.setdefault(self.generation, gone(self.rank))
            self._break()

    def enter(self, number: int) -> None:
        """Records the number and the time. No channel of an earlier call can break, because a rank has handed over all
        its sends when it leaves a call.
        """
        self.place.enter(number)

    def reopen(self) -> None:
        if (self.generation, self.rank) in self.hub.closed:
            self.generation += 1
            self._connected.clear()
            if self.hub.elastic:
                self.living = self.hub.open(self, self.generation)

    def close(self) -> None:
        """Tells the others that this rank leaves; the channels are freed with the hub."""
        with self.hub.changed:
            self.hub.gone.add(self.rank)
