"""The in-process transport: the ranks are threads of one process. For debugging, for fast tests, for several stages on
one GPU, and for a pipeline of a single rank.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from pipeflow.core.errors import Failure
from pipeflow.parallel.control.diagnosis import Blame
from pipeflow.parallel.transport.group import Alone, Group
from pipeflow.parallel.transport.local_group import LocalGroup, Rendezvous
from pipeflow.parallel.transport.protocol import Channel, Start, Tag
from pipeflow.parallel.transport.work import Connection, LinkError, Work


class Hub(Rendezvous):
    """The state that the ranks of one in-process world share.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.channels: dict[tuple[int, int, int, Tag], _Channel] = defaultdict(_Channel)
        self.failures: dict[int, Failure] = {}  # by generation


class _Channel:
    """A FIFO of transfers that only one end has started so far."""

    def __init__(self) -> None:
        self.sends: deque[_Transfer] = deque()
        self.receives: deque[_Transfer] = deque()


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
        self._connected: set[Channel] = set()
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def world_rank(self, peer: int) -> int:
        return peer

    def group(self, ranks: Sequence[int]) -> Group:
        return LocalGroup(self, tuple(ranks)) if len(ranks) > 1 else Alone()

    def connect(self, channels: Iterable[Channel]) -> None:
        """Records `channels`; threads need no connection."""
        self._connected.update(channels)

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
            channel = self.hub.channels[key]
            mine, other = (channel.sends, channel.receives) if sending else (channel.receives, channel.sends)
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

    @property
    def patience(self) -> float | None:
        return self.hub.patience.get(self.rank)

    @patience.setter
    def patience(self, seconds: float | None) -> None:
        self.hub.patience[self.rank] = seconds

    @property
    def call(self) -> object:
        return self.hub.calls.get(self.rank, "")

    @call.setter
    def call(self, asked: object) -> None:
        self.hub.calls[self.rank] = asked

    def report(self, failure: Failure | LinkError) -> Failure:
        with self.hub.changed:
            if isinstance(failure, LinkError):
                blame = self.hub.blames.get((self.generation, self.rank)) or Blame(
                    failure.peer, "it closed its channels"
                )
                failure = blame.failure(failure.story(self.rank, self.timeout))
            first = self.hub.failures.setdefault(self.generation, failure)
            self.hub.closed.add((self.generation, self.rank))
            for key in [key for key in self.hub.channels if key[0] == self.generation and self.rank in key[1:3]]:
                del self.hub.channels[key]
            for collective in [
                key for key in self.hub.collectives if key[0] == self.generation and self.rank in key[1]
            ]:
                del self.hub.collectives[collective]
            self.hub.changed.notify_all()
        return first

    def enter(self, number: int) -> None:
        """Records the time. No channel of an earlier call can break, because a rank has handed over all its sends when
        it leaves a call.
        """
        self.hub.begun[self.rank] = time.monotonic()

    def reopen(self) -> None:
        if (self.generation, self.rank) in self.hub.closed:
            self.generation += 1
            self._connected.clear()

    def close(self) -> None:
        """Tells the others that this rank leaves; the channels are freed with the hub."""
        with self.hub.changed:
            self.hub.gone.add(self.rank)
