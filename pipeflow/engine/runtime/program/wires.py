"""Wires: how a value passes between two ranks. A receive is posted, then waited for; a send is started, then released.
The shape of an activation is known, from the user's promise, or learned: then a header is sent with each and says
whether it has the shape that its receiver posted for. A shape that came twice in a row is posted for ahead; if it is
small, an entry at the end of the same message says so instead. A gradient has the shape of its activation.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipeflow.core.dataflow import Value
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.plain import pack, unpack
from pipeflow.engine.parallel.transport.protocol import Channel, Connection, Start, Tag, Transport
from pipeflow.engine.runtime.program.slots import Metadata, Slot
from pipeflow.engine.runtime.program.unused import Unused, from_message, to_message
from pipeflow.engine.torch_private.trees import tree_flatten, tree_unflatten

LOG = logging.getLogger("pipeflow")
_SMALL = 1 << 18  # bytes that are copied in less time than another message takes
_ENDS = {
    dtype: torch.ones(1, dtype=dtype, device="cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
}


class Wire:
    """One end of the way of a value.

    Attributes:
        value: the value.
        slot: where its tensors are on this rank.
        link: waits for transfers, and interprets their errors.
        device: device of the rank.
        metadata: of an activation, as it passed last or is known to pass.
    """

    __slots__ = ("device", "link", "metadata", "slot", "value")

    def __init__(self, value: Value, slot: Slot, link: Connection, device: torch.device) -> None:
        self.value, self.slot, self.link, self.device = value, slot, link, device
        self.metadata: Metadata | None = None

    def post(self) -> None:
        """Posts the receive of the value."""
        raise NotImplementedError

    def send(self) -> None:
        """Starts to send the value."""
        raise NotImplementedError

    def wait(self) -> None:
        """Waits until a posted receive has arrived."""
        self.slot.done(self.link)

    def release(self) -> None:
        """Frees what was sent. The program proves that the peer has received it, so the wait returns at once."""
        self.slot.done(self.link)


class KnownWire(Wire):
    """Of an activation of known shape. A send checks it, because a channel does not. `metadata` is set before the first
    step, and when microbatches change in size.
    """

    __slots__ = ("start",)

    def __init__(self, value: Value, slot: Slot, link: Connection, device: torch.device, start: Start) -> None:
        super().__init__(value, slot, link, device)
        self.start = start

    def post(self) -> None:
        slot, metadata = self.slot, self.metadata
        assert metadata is not None
        slot.tensors, slot.grads = metadata.empty(self.device), metadata.grads
        slot.works = [self.start(slot.tensors)]

    def send(self) -> None:
        slot, metadata = self.slot, self.metadata
        assert metadata is not None
        if len(slot.tensors) != 1 or slot.spec is not None:
            raise UsageError("with tensor_shape, a stage must return one tensor: leave it None for other outputs")
        [tensor] = slot.tensors
        if tensor.shape != metadata.shapes[0] or tensor.dtype != metadata.dtypes[0]:
            raise UsageError(
                f"stage {self.value.stage} returned a {tensor.dtype} of shape {tuple(tensor.shape)}, but tensor_shape="
                f"{tuple(metadata.shapes[0])} and tensor_dtype={metadata.dtypes[0]} were given: correct them, "
                "make the first entry None if microbatches differ in size, or leave tensor_shape None"
            )
        slot.works = [self.start(slot.take())]


class GradientWire(Wire):
    """Of a gradient. Its receiver knows the shapes from `answered`, the wire of the activation that it sent."""

    __slots__ = ("answered", "start")

    def __init__(
        self,
        value: Value,
        slot: Slot,
        link: Connection,
        device: torch.device,
        start: Start,
        answered: Wire,
    ) -> None:
        super().__init__(value, slot, link, device)
        self.start = start
        self.answered = answered

    def post(self) -> None:
        assert self.answered.metadata is not None
        slot, metadata = self.slot, self.answered.metadata
        for shape, dtype, wanted in zip(metadata.shapes, metadata.dtypes, metadata.grads, strict=True):
            if wanted:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                slot.tensors.append(tensor)
                slot.works.append(self.start([tensor]))

    def wait(self) -> None:
        super().wait()
        self.slot.tensors = [from_message(message) for message in self.slot.tensors]

    def send(self) -> None:
        slot = self.slot
        for gradient in slot.take():
            if isinstance(gradient, Unused) and gradient.device.type != "cpu":
                _warn(self.value.stage)
            slot.works.append(self.start([to_message(gradient)]))


@cache
def _warn(stage: int) -> None:
    """Says once what is done to weights whose gradient does not exist."""
    LOG.warning(
        "stage %d did not use a value that it received, and between GPUs the gradient of such a value is zeros: weight "
        "decay and momentum move weights that lead to it alone, where plain torch has no gradient and leaves them. Use "
        "the value in each batch, for example times 0, or freeze these weights",
        stage,
    )


class LearnedChannels(NamedTuple):
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
    def sending(cls, transport: Transport, peer: int) -> LearnedChannels:
        return cls(*(transport.sender(peer, tag) for tag in _TAGS))

    @classmethod
    def receiving(cls, transport: Transport, peer: int) -> LearnedChannels:
        return cls(*(transport.receiver(peer, tag) for tag in _TAGS))


_TAGS = (Tag.HEADER, Tag.METADATA, Tag.ACTIVATION, Tag.REDIRECTED)
_AS_EXPECTED = torch.zeros(1, dtype=torch.int64, device="cpu")


class LearnedWire(Wire):
    """Of an activation of unknown shape. Both ends see the same history, so they expect the same.

    Args:
        channels: the channels, of this end.
        inbox: wires posted between this pair of ranks, in order. Waiting for one waits for those before, because their
            headers come first.

    Attributes:
        expected: what the next activation is expected to be; None for anything.
        end: the entry after those of the expected activation in its message, a 1, if it has no header; else None.
        pending: whether a header is to be read.
    """

    __slots__ = ("channels", "end", "expected", "header", "inbox", "pending")

    def __init__(
        self,
        value: Value,
        slot: Slot,
        link: Connection,
        device: torch.device,
        channels: LearnedChannels,
        inbox: deque[LearnedWire],
    ) -> None:
        super().__init__(value, slot, link, device)
        self.channels, self.inbox = channels, inbox
        self.expected: Metadata | None = None
        self.end: Tensor | None = None
        self.header = torch.empty(1, dtype=torch.int64, device="cpu")
        self.pending = False

    def _see(self, metadata: Metadata) -> None:
        """Records what passed. A shape that passes twice in a row is expected next time."""
        self.expected = metadata if metadata == self.metadata else None
        self.metadata, self.end = metadata, None
        if self.expected is not None and self.device.type == "cpu" and len(metadata.shapes) == 1:
            [shape], [dtype] = metadata.shapes, metadata.dtypes
            self.end = _ENDS.get(dtype) if shape.numel() * dtype.itemsize <= _SMALL else None

    def _buffers(self) -> list[Tensor]:
        """Memory for the messages that have the expected activation; none if nothing is expected."""
        if self.expected is None:
            return []
        if self.end is None:
            return self.expected.empty(self.device)
        return [torch.empty(self.expected.shapes[0].numel() + 1, dtype=self.end.dtype, device="cpu")]

    def send(self) -> None:
        """Sends a header, then the activation: on the channel where it is expected, or after its metadata on the
        channel for redirected activations.
        """
        slot, expected, end = self.slot, self.expected, self.end
        channel = self.channels.expected
        if expected is None or not expected.matches(slot):
            self._announce()
            channel = self.channels.redirected
        elif end is None:
            slot.works.append(self.channels.header([_AS_EXPECTED]))
        else:
            [tensor] = slot.tensors
            slot.tensors = [torch.cat((tensor.view(-1), end))]
        for tensor in slot.take():
            slot.works.append(channel([tensor]))

    def _announce(self) -> None:
        """Sends the activation's metadata, and unused tensors to fill receives that were posted for another shape."""
        works, metadata = self.slot.works, Metadata.of(self.slot)
        body = torch.frombuffer(bytearray(_packed(metadata)), dtype=torch.uint8)
        announce = self.channels.header if self.end is None else self.channels.metadata
        works.append(announce([torch.tensor([len(body)], device="cpu")]))
        works.append(self.channels.metadata([body]))
        works += [self.channels.expected([each.zero_()]) for each in self._buffers()]
        self._see(metadata)

    def post(self) -> None:
        """Posts the receive of the header, if there will be one, and of the activation if one is expected."""
        slot, channels = self.slot, self.channels
        slot.tensors = self._buffers()
        slot.works = [] if self.end is not None else [channels.header([self.header])]
        for tensor in slot.tensors:
            slot.works.append(channels.expected([tensor]))
        self.pending = True
        self.inbox.append(self)

    def wait(self) -> None:
        while self.pending:
            self.inbox.popleft()._arrive()

    def _arrive(self) -> None:
        """Reads the header and, if the activation is not as expected, receives it now."""
        slot = self.slot
        slot.done(self.link)
        if length := self._length():
            body = torch.empty(length, dtype=torch.uint8, device="cpu")
            self.link.wait([self.channels.metadata([body])])
            metadata = _unpacked(bytes(body.tolist()))
            slot.tensors = metadata.empty(self.device)
            self.link.wait([self.channels.redirected([tensor]) for tensor in slot.tensors])
            self._see(metadata)
        assert self.metadata is not None
        slot.spec, slot.grads = self.metadata.spec, self.metadata.grads
        self.pending = False

    def _length(self) -> int:
        """The number of bytes of the metadata that follow; 0 if the activation is as expected, and thus here."""
        if self.expected is not None and self.end is not None:
            [tensor] = self.slot.tensors
            if tensor[-1].item() == 1:
                tensor.resize_(self.expected.shapes[0])
                return 0
            self.link.wait([self.channels.metadata([self.header])])
        return int(self.header)


def _packed(metadata: Metadata) -> bytes:
    """`metadata` as bytes. Its tree is sent as a tree of numbers, because torch's TreeSpec cannot be packed."""
    tree = None if metadata.spec is None else tree_unflatten(range(len(metadata.shapes)), metadata.spec)
    return pack((metadata.spec is None, tree, *metadata[1:]))


def _unpacked(body: bytes) -> Metadata:
    bare, tree, shapes, dtypes, grads = unpack(body)
    return Metadata(None if bare else tree_flatten(tree)[1], shapes, dtypes, grads)
