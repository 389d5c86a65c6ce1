"""Groups of threads, which a LocalTransport makes of some of its ranks. The last rank to arrive computes for all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Protocol

import torch
from torch import Tensor

from pipeflow.parallel.control.diagnosis import AGAIN, Blame, Status, diagnose, left
from pipeflow.parallel.transport.work import LinkError, Work

Inputs = list[tuple[Tensor, ...]]  # per rank of the group, the tensors that its call was given


class Collective:
    """One collective under way, with the inputs of the ranks that have arrived."""

    def __init__(self) -> None:
        self.inputs: dict[int, tuple[Tensor, ...]] = {}
        self.ready: list[torch.cuda.Event] = []
        self.done = False
        self.computed: torch.cuda.Event | None = None

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


class Rendezvous:
    """The state through which the threads of a world wait for each other, and their collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = Condition()
        self.collectives: dict[tuple[int, tuple[int, ...], int], Collective] = {}  # by generation, ranks and number
        self.closed: set[tuple[int, int]] = set()  # (generation, rank) of ranks that know of a failure
        self.gone: set[int] = set()
        self.waits_for: dict[tuple[int, int], tuple[int, ...]] = {}  # by rank and thread: threads of a trace wait, too
        self.patience: dict[int, float | None] = {}
        self.calls: dict[int, object] = {}
        self.begun: dict[int, float] = {}  # by rank, when its current call began
        self.blames: dict[tuple[int, int], Blame] = {}  # by generation and by the rank that gave up

    def wait(self, by: Participant, generation: int, ranks: tuple[int, ...], done: Callable[[], bool]) -> None:
        """Waits, as rank `by` and with `changed` held, until `done()` or a rank of `ranks` has closed its channels.
        Raises LinkError.
        """
        waited, pause, here = 0.0, by.timeout, (by.rank, get_ident())
        self.waits_for[here] = ranks
        try:
            while not self.changed.wait_for(lambda: done() or self._closed(generation, ranks), pause):
                waited += pause
                pause = AGAIN * by.timeout
                if blame := diagnose(by.rank, waited, self._statuses()):
                    self.blames[generation, by.rank] = blame
                    raise LinkError(ranks[0], expired=True)
        finally:
            del self.waits_for[here]
        if not done():
            raise LinkError(self._closed(generation, ranks)[0])

    def require_open(self, generation: int, ranks: tuple[int, ...]) -> None:
        """Raises LinkError if a rank of `ranks` has closed its channels."""
        for rank in self._closed(generation, ranks):
            raise LinkError(rank)

    def _closed(self, generation: int, ranks: tuple[int, ...]) -> list[int]:
        return [rank for rank in ranks if (generation, rank) in self.closed]

    def _statuses(self) -> dict[int, Status | Blame]:
        return {rank: left(rank) if rank in self.gone else self._status(rank) for rank in range(self.size)}

    def _status(self, rank: int) -> Status:
        inside = time.monotonic() - self.begun.get(rank, -math.inf)
        return Status(self._awaited_by(rank), self.patience.get(rank), str(self.calls.get(rank, "")), inside)

    def _awaited_by(self, rank: int) -> tuple[int, ...]:
        return tuple(other for (waiting, _), ranks in self.waits_for.items() if waiting == rank for other in ranks)


class Participant(Protocol):
    """The part of a rank's transport that its groups use."""

    rank: int
    generation: int
    timeout: float

    @property
    def hub(self) -> Rendezvous:
        """The state that all ranks share."""


class LocalGroup:
    """The `ranks` of a transport as a group; they are threads of this process."""

    def __init__(self, transport: Participant, ranks: tuple[int, ...]) -> None:
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self._ranks = ranks
        self._transport = transport
        self._count = 0  # number of this rank's calls
        self._generation = 0

    def connect(self) -> None:
        """Does nothing; threads need no connection."""

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._join(_sum, tensor)

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

    def _join(self, what: Callable[[Inputs], None], *tensors: Tensor) -> Work:
        transport, hub, generation = self._transport, self._transport.hub, self._transport.generation
        if generation != self._generation:
            self._generation, self._count = generation, 0
        key = (generation, self._ranks, self._count)
        self._count += 1
        with hub.changed, _saying(f"in a collective of ranks {list(self._ranks)}"):
            hub.require_open(generation, self._ranks)
            collective = hub.collectives.setdefault(key, Collective())
            collective.inputs[self.rank] = tensors
            if tensors[0].is_cuda:
                collective.ready.append(torch.cuda.current_stream().record_event())
            if len(collective.inputs) == self.size:
                del hub.collectives[key]
                collective.compute(what)
                hub.changed.notify_all()
        return _CollectiveWork(transport, collective, self._ranks)


class _CollectiveWork:
    """A rank's end of a collective."""

    __slots__ = ("_collective", "_generation", "_others", "_ranks", "_transport")

    def __init__(self, transport: Participant, collective: Collective, ranks: tuple[int, ...]) -> None:
        self._transport = transport
        self._generation = transport.generation
        self._collective = collective
        self._ranks = ranks
        self._others = tuple(rank for rank in ranks if rank != transport.rank)

    def wait(self) -> None:
        transport, collective = self._transport, self._collective
        with transport.hub.changed, _saying(f"in a collective of ranks {list(self._ranks)}"):
            transport.hub.wait(transport, self._generation, self._others, lambda: collective.done)
        if collective.computed is not None:
            torch.cuda.current_stream().wait_event(collective.computed)


@contextmanager
def _saying(doing: str) -> Iterator[None]:
    """Makes a LinkError raised inside say what this rank was `doing`."""
    try:
        yield
    except LinkError as error:
        raise error.during(doing) from None


def _require_pieces(whole: Tensor, part: Tensor, size: int) -> None:
    if whole.shape != (size * part.shape[0], *part.shape[1:]):
        raise ValueError(f"{size} pieces of {tuple(part.shape)} along dim 0 do not make up {tuple(whole.shape)}")


def _sum(inputs: Inputs) -> None:
    total = _summed([tensor for [tensor] in inputs])
    for [tensor] in inputs:
        tensor.copy_(total)


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
