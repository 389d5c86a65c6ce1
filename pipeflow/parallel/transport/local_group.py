"""Groups of threads: what a LocalTransport makes of some of its ranks. The last to come computes for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition
from typing import Protocol

import torch
from torch import Tensor

from pipeflow.parallel.transport.work import LinkError, Work

Inputs = list[tuple[Tensor, ...]]  # per rank of the group, the tensors that its call was given


class Collective:
    """One collective under way: the inputs of the ranks that have come so far."""

    def __init__(self) -> None:
        self.inputs: dict[int, tuple[Tensor, ...]] = {}
        self.ready: list[torch.cuda.Event] = []
        self.done = False
        self.computed: torch.cuda.Event | None = None

    def compute(self, what: Callable[[Inputs], None]) -> None:
        """Called by the last to come, whose stream, on a GPU, waits for the others' first."""
        for event in self.ready:
            torch.cuda.current_stream().wait_event(event)
        with torch.no_grad():
            what([self.inputs[rank] for rank in range(len(self.inputs))])
        self.inputs.clear()
        if self.ready:
            self.computed = torch.cuda.current_stream().record_event()
        self.done = True


class Rendezvous:
    """What the threads of a world share for their collectives."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.collectives: dict[tuple[int, tuple[int, ...], int], Collective] = {}  # by generation, ranks and number
        self.closed: set[tuple[int, int]] = set()  # (generation, rank) of those that were told of a failure


class Participant(Protocol):
    """A rank's transport, as its groups see it."""

    rank: int
    generation: int
    timeout: float

    @property
    def hub(self) -> Rendezvous:
        """Shared by all ranks."""


class LocalGroup:
    """The `ranks` of a transport: threads of this process."""

    def __init__(self, transport: Participant, ranks: tuple[int, ...]) -> None:
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self._ranks = ranks
        self._transport = transport
        self._count = 0  # of this rank's calls
        self._generation = 0

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
        hub, generation = self._transport.hub, self._transport.generation
        if generation != self._generation:
            self._generation, self._count = generation, 0
        key = (generation, self._ranks, self._count)
        self._count += 1
        with hub.changed:
            collective = hub.collectives.setdefault(key, Collective())
            waiting = _CollectiveWork(hub, collective, self._ranks, generation, self._transport.timeout)
            waiting.require_open()
            collective.inputs[self.rank] = tensors
            if tensors[0].is_cuda:
                collective.ready.append(torch.cuda.current_stream().record_event())
            if len(collective.inputs) == self.size:
                del hub.collectives[key]
                collective.compute(what)
                hub.changed.notify_all()
        return waiting


class _CollectiveWork:
    """A rank's end of a collective."""

    __slots__ = ("_collective", "_generation", "_hub", "_ranks", "_timeout")

    def __init__(
        self, hub: Rendezvous, collective: Collective, ranks: Sequence[int], generation: int, timeout: float
    ) -> None:
        self._hub = hub
        self._collective = collective
        self._ranks = ranks
        self._generation = generation
        self._timeout = timeout

    def wait(self) -> None:
        with self._hub.changed:
            awake = self._hub.changed.wait_for(lambda: self._collective.done or self._closed(), timeout=self._timeout)
            if not awake:
                missing = [rank for index, rank in enumerate(self._ranks) if index not in self._collective.inputs]
                raise self._error(missing[0], f"timed out after {self._timeout} s")
            if not self._collective.done:
                self.require_open()
        if self._collective.computed is not None:
            torch.cuda.current_stream().wait_event(self._collective.computed)

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


def _sum(inputs: Inputs) -> None:
    total = _summed([tensor for [tensor] in inputs])
    for [tensor] in inputs:
        tensor.copy_(total)


def _summed(tensors: Sequence[Tensor]) -> Tensor:
    """In rank order."""
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
