"""Transfers of activations of unknown shape: a header is sent with each and says whether the activation has the shape
that its receiver posted for. A shape that came twice in a row is posted for ahead. If it is small, an entry at the end
of the same message says so instead.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from pipeflow.core.dataflow import Value
from pipeflow.engine.parallel.transport.plain import pack, unpack
from pipeflow.engine.parallel.transport.protocol import Channel, Connection, Start, Tag, Transport
from pipeflow.engine.runtime.program.payload import Metadata, Payload
from pipeflow.engine.runtime.program.transfers import ChannelOperation
from pipeflow.engine.torch_private.trees import tree_flatten, tree_unflatten

_SMALL = 1 << 18  # bytes that are copied in less time than another message takes
_ENDS = {
    dtype: torch.ones(1, dtype=dtype, device="cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
}


class Expectation:
    """The expected metadata of one value in the next step. Both ends see the same history, so they expect the same.

    Attributes:
        end: the entry after those of the expected activation in its message, a 1, if it has no header; else None.
    """

    __slots__ = ("_device", "end", "expected", "last")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.expected: Metadata | None = None
        self.last: Metadata | None = None
        self.end: Tensor | None = None

    def see(self, metadata: Metadata) -> None:
        """Records what arrived. A shape that arrives twice in a row is expected next time."""
        self.expected = metadata if metadata == self.last else None
        self.last, self.end = metadata, None
        if self.expected is not None and self._device.type == "cpu" and len(metadata.shapes) == 1:
            [shape], [dtype] = metadata.shapes, metadata.dtypes
            self.end = _ENDS.get(dtype) if shape.numel() * dtype.itemsize <= _SMALL else None

    def buffers(self) -> list[Tensor]:
        """Memory for the messages that have the expected activation; none if nothing is expected."""
        if self.expected is None:
            return []
        if self.end is None:
            return self.expected.empty(self._device)
        return [torch.empty(self.expected.shapes[0].numel() + 1, dtype=self.end.dtype, device="cpu")]


class DynamicChannels(NamedTuple):
    """One end of the four channels for activations of unknown shape between an ordered pair of ranks."""

    header: Start
    metadata: Start
    expected: Start
    redirected: Start

    @staticmethod
    def between(source: int, destination: int) -> list[Channel]:
        """The channels of the transfers from `source` to `destination`, to be connected first."""
        return [Channel(source, destination, tag) for tag in _TAGS]

    @classmethod
    def sending(cls, transport: Transport, peer: int) -> DynamicChannels:
        return cls(*(transport.sender(peer, tag) for tag in _TAGS))

    @classmethod
    def receiving(cls, transport: Transport, peer: int) -> DynamicChannels:
        return cls(*(transport.receiver(peer, tag) for tag in _TAGS))


_TAGS = (Tag.HEADER, Tag.METADATA, Tag.ACTIVATION, Tag.REDIRECTED)


class SendDynamic(ChannelOperation):
    """Sends a header, then the activation: on the channel where it is expected, or after its metadata on the channel
    for redirected activations.
    """

    __slots__ = ("channels", "expectation", "metadata")

    doing = "sending"
    metadata: Metadata
    """Metadata of the last activation."""

    def __init__(
        self, value: Value, link: Connection, payload: Payload, channels: DynamicChannels, device: torch.device
    ) -> None:
        super().__init__(value, link, payload)
        self.channels = channels
        self.expectation = Expectation(device)

    def __call__(self) -> None:
        payload, expected, end = self.payload, self.expectation.expected, self.expectation.end
        channel = self.channels.expected
        if expected is None or not expected.matches(payload.tensors, payload.spec, payload.grads):
            self._announce()
            channel = self.channels.redirected
        elif end is None:
            payload.works.append(self.channels.header([_AS_EXPECTED]))
        else:
            [tensor] = payload.tensors
            payload.tensors = [torch.cat((tensor.view(-1), end))]
        for tensor in payload.tensors:
            payload.works.append(channel([tensor]))
        payload.tensors = []

    def _announce(self) -> None:
        """Sends the activation's metadata, and unused tensors to fill receives that were posted for another shape."""
        payload, works = self.payload, self.payload.works
        metadata = self.metadata = Metadata.of(payload.tensors, payload.spec, payload.grads)
        body = torch.frombuffer(bytearray(_packed(metadata)), dtype=torch.uint8)
        announce = self.channels.header if self.expectation.end is None else self.channels.metadata
        works.append(announce([torch.tensor([len(body)], device="cpu")]))
        works.append(self.channels.metadata([body]))
        works += [self.channels.expected([each.zero_()]) for each in self.expectation.buffers()]
        self.expectation.see(metadata)


_AS_EXPECTED = torch.zeros(1, dtype=torch.int64, device="cpu")


def _packed(metadata: Metadata) -> bytes:
    """`metadata` as bytes. Its tree is sent as a tree of numbers, because torch's TreeSpec cannot be packed."""
    tree = None if metadata.spec is None else tree_unflatten(range(len(metadata.shapes)), metadata.spec)
    return pack((metadata.spec is None, tree, *metadata[1:]))


def _unpacked(body: bytes) -> Metadata:
    bare, tree, shapes, dtypes, grads = unpack(body)
    return Metadata(None if bare else tree_flatten(tree)[1], shapes, dtypes, grads)


class Arrival:
    """An activation on its way: the payload that it will fill, and its header. `pending` is True until the header is
    read.
    """

    __slots__ = ("channels", "device", "expectation", "header", "payload", "pending")

    def __init__(self, payload: Payload, channels: DynamicChannels, device: torch.device) -> None:
        self.payload = payload
        self.channels = channels
        self.device = device
        self.expectation = Expectation(device)
        self.header = torch.empty(1, dtype=torch.int64, device="cpu")
        self.pending = False

    def post(self) -> None:
        """Posts the receive of the header, if there will be one, and of the activation if one is expected."""
        payload, channels, expectation = self.payload, self.channels, self.expectation
        payload.tensors = expectation.buffers()
        payload.works = [] if expectation.end is not None else [channels.header([self.header])]
        for tensor in payload.tensors:
            payload.works.append(channels.expected([tensor]))
        self.pending = True

    def read(self, link: Connection) -> int:
        """The number of bytes of the metadata that follow; 0 if the activation is as expected, and thus here."""
        expected = self.expectation.expected
        if expected is not None and self.expectation.end is not None:
            [tensor] = self.payload.tensors
            if tensor[-1].item() == 1:
                tensor.resize_(expected.shapes[0])
                return 0
            link.wait([self.channels.metadata([self.header])])
        return int(self.header)


class PostDynamic(ChannelOperation):
    """Posts the receive of a header, and of the activation if one is expected."""

    __slots__ = ("arrival", "inbox")

    doing = "posting the receive of"

    def __init__(self, value: Value, link: Connection, arrival: Arrival, inbox: deque[Arrival]) -> None:
        super().__init__(value, link, arrival.payload)
        self.arrival = arrival
        self.inbox = inbox  # arrivals posted between this pair of ranks, in order

    def __call__(self) -> None:
        self.arrival.post()
        self.inbox.append(self.arrival)


class WaitDynamic(ChannelOperation):
    """Waits for all values that were posted between this pair of ranks, in order, up to its own value. Reads each
    header and, if the activation is not as expected, receives it now.
    """

    __slots__ = ("arrival", "inbox")

    doing = "waiting for"

    def __init__(self, value: Value, link: Connection, arrival: Arrival, inbox: deque[Arrival]) -> None:
        super().__init__(value, link, arrival.payload)
        self.arrival = arrival
        self.inbox = inbox

    def __call__(self) -> None:
        while self.arrival.pending:
            arrival = self.inbox.popleft()
            payload, expectation = arrival.payload, arrival.expectation
            self.link.wait(payload.works)
            payload.works = []
            if length := arrival.read(self.link):
                expectation.see(self._redirected(arrival, length))
            assert expectation.last is not None
            payload.spec, payload.grads = expectation.last.spec, expectation.last.grads
            arrival.pending = False

    def _redirected(self, arrival: Arrival, length: int) -> Metadata:
        """Receives an activation that is not as expected."""
        body = torch.empty(length, dtype=torch.uint8, device="cpu")
        self.link.wait([arrival.channels.metadata([body])])
        metadata = _unpacked(bytes(body.tolist()))
        arrival.payload.tensors = metadata.empty(arrival.device)
        self.link.wait([arrival.channels.redirected([tensor]) for tensor in arrival.payload.tensors])
        return metadata
