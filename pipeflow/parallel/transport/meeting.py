"""Groups of threads: what a LocalTransport makes of some of its ranks. The last to come computes for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition
from typing import Protocol

import torch
from torch import Tensor

from pipeflow.parallel.transport.work import LinkError, Work

Brought = list[tuple[Tensor, ...]]  # per rank of the group, the tensors that its call was given


class Meeting:
    """One collective: what the ranks have brought so far."""

    def __init__(self) -> None:
        self.brought: dict[int, tuple[Tensor, ...]] = {}
        self.ready: list[torch.cuda.Event] = []
        self.done = False
        self.computed: torch.cuda.Event | None = None

    def compute(self, what: Callable[[Brought], None]) -> None:
        """Called by the last to come, whose stream, on a GPU, waits for the others' first."""
        for event in self.ready:
            torch.cuda.current_stream().wait_event(event)
        with torch.no_grad():
            what([self.brought[rank] for rank in range(len(self.brought))])
        self.brought.clear()
        if self.ready:
            self.computed = torch.cuda.current_stream().record_event()
        self.done = True


class Room:
    """Where threads meet."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.meetings: dict[tuple[int, tuple[int, ...], int], Meeting] = {}  # by generation, ranks and number
        self.closed: set[tuple[int, int]] = set()  # (generation, rank) of those that were told of a failure


class Member(Protocol):
    """A rank's transport, as its groups see it."""

    rank: int
    generation: int
    timeout: float

    @property
    def hub(self) -> Room:
        """Shared by all ranks."""


class LocalGroup:
    """The `ranks` of a transport: threads of this process."""

    def __init__(self, transport: Member, ranks: tuple[int, ...]) -> None:
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self._ranks = ranks
        self._transport = transport
        self._count = 0  # of this rank's calls
        self._generation = 0

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._meet(_sum, tensor)

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return self._meet(_maximum, tensor)

    def all_gather(self, whole: Tensor, part: Tensor) -> Work:
        _require_pieces(whole, part, self.size)
        return self._meet(_gather, whole, part)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        _require_pieces(whole, part, self.size)
        return self._meet(_scatter, part, whole)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        def copy(brought: Brought) -> None:
            for [target] in brought:
                target.copy_(brought[source][0])

        return self._meet(copy, tensor)

    def _meet(self, what: Callable[[Brought], None], *tensors: Tensor) -> Work:
        hub, generation = self._transport.hub, self._transport.generation
        if generation != self._generation:
            self._generation, self._count = generation, 0
        key = (generation, self._ranks, self._count)
        self._count += 1
        with hub.changed:
            meeting = hub.meetings.setdefault(key, Meeting())
            waiting = _Waiting(hub, meeting, self._ranks, generation, self._transport.timeout)
            waiting.require_open()
            meeting.brought[self.rank] = tensors
            if tensors[0].is_cuda:
                meeting.ready.append(torch.cuda.current_stream().record_event())
            if len(meeting.brought) == self.size:
                del hub.meetings[key]
                meeting.compute(what)
                hub.changed.notify_all()
        return waiting


class _Waiting:
    """A rank's end of a meeting."""

    __slots__ = ("_generation", "_hub", "_meeting", "_ranks", "_timeout")

    def __init__(self, hub: Room, meeting: Meeting, ranks: Sequence[int], generation: int, timeout: float) -> None:
        self._hub = hub
        self._meeting = meeting
        self._ranks = ranks
        self._generation = generation
        self._timeout = timeout

    def wait(self) -> None:
        with self._hub.changed:
            awake = self._hub.changed.wait_for(lambda: self._meeting.done or self._closed(), timeout=self._timeout)
            if not awake:
                missing = [rank for index, rank in enumerate(self._ranks) if index not in self._meeting.brought]
                raise self._error(missing[0], f"timed out after {self._timeout} s")
            if not self._meeting.done:
                self.require_open()
        if self._meeting.computed is not None:
            torch.cuda.current_stream().wait_event(self._meeting.computed)

    def require_open(self) -> None:
        """Raises LinkError when a rank has given its channels up."""
        for rank in self._closed():
            raise self._error(rank, "the channel is closed")

    def _closed(self) -> list[int]:
        return [rank for rank in self._ranks if (self._generation, rank) in self._hub.closed]

    def _error(self, rank: int, why: str) -> LinkError:
        return LinkError(rank, f"in a collective of ranks {list(self._ranks)}", RuntimeError(why))


def _require_pieces(whole: Tensor, part: Tensor, size: int) -> None:
    if whole.shape != (size * part.shape[0], *part.shape[1:]):
        raise ValueError(f"{size} pieces of {tuple(part.shape)} along dim 0 are no {tuple(whole.shape)}")


def _sum(brought: Brought) -> None:
    total = _summed([tensor for [tensor] in brought])
    for [tensor] in brought:
        tensor.copy_(total)


def _summed(tensors: Sequence[Tensor]) -> Tensor:
    """In rank order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _maximum(brought: Brought) -> None:
    total = torch.stack([tensor for [tensor] in brought]).amax(dim=0)
    for [tensor] in brought:
        tensor.copy_(total)


def _gather(brought: Brought) -> None:
    everything = torch.cat([part for _, part in brought])
    for whole, _ in brought:
        whole.copy_(everything)


def _scatter(brought: Brought) -> None:
    total = _summed([whole for _, whole in brought])
    for (part, _), piece in zip(brought, total.chunk(len(brought)), strict=True):
        part.copy_(piece)
