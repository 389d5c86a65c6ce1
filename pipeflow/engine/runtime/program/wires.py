"""Wires: how a value passes between two ranks. A receive is posted, then waited for; a send is started, then released.
Both ends of a wire expect the same activation: the one that the user promised, or one like the last two. If they know
that it comes, or if its message itself can say that it does not, it has no header. A gradient has the shape of its
activation.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import compress

import torch
from torch import Tensor

from pipeflow.core.dataflow import Content, Value
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.plain import pack, unpack
from pipeflow.engine.parallel.transport.protocol import Connection, Start, Tag, Transport, Work
from pipeflow.engine.runtime.program.slots import (
    Buffers,
    Form,
    Metadata,
    Promise,
    Slot,
    Unused,
    bears_mark,
    is_marked,
    to_message,
)
from pipeflow.engine.torch_private.trees import tree_flatten, tree_unflatten

LOG = logging.getLogger("pipeflow")

# Theory of operation
#
# A receive is posted before it is known what comes, so both ends must expect the same. What they expect follows from
# what both have seen. If something else comes, its receiver must hear of it, or would take it for what it expects.
#
# Between CPUs the message says so: it begins with a mark, a NaN whose bits no computation makes, and what came instead
# follows on other channels. So an activation with a number of floating point has no header, and a gradient that does
# not exist is told with its message. A tensor that begins with these bits all the same gets another NaN.
#
# The host of a GPU would have to wait for such a message. There, ranks tell each other at the beginning of a step
# whether it is like earlier ones (`Expectations.known`); then nothing else may come, and a sender that has something
# else raises an error on all ranks. In other steps each activation has a header.


@dataclass(slots=True)
class Expectations:
    """What a rank of a pipeline expects of the activations of a step.

    Attributes:
        promise: what the user promised of them, if the step relies on it.
        known: whether all ranks know that activations are as expected.
        vary: whether they were not, although all ranks knew it.
    """

    promise: Promise | None = None
    known: bool = False
    vary: bool = False

    def broken(self, value: Value, slot: Slot, expected: Metadata) -> UsageError:
        """The error for an activation that all ranks expected to be another one."""
        self.vary = self.promise is None
        why = (
            "as in earlier steps, for batches of the same shapes; run the step again: from now on, ranks tell each "
            "other what they send"
            if self.vary
            else "which tensor_shape and tensor_dtype say: correct them, make the first entry None if microbatches "
            "differ in size, or leave tensor_shape None for other outputs"
        )
        found = Metadata.of(slot)
        return UsageError(f"stage {value.stage} returned {found}, but its receiver expects {expected}, {why}")


@dataclass(slots=True, eq=False)
class Wire(ABC):
    """One end of the way of a value.

    Attributes:
        value: the value.
        slot: where its tensors are on this rank.
        link: waits for transfers, and interprets their errors.
        buffers: memory of the rank for what it receives.
        starts: what starts a transfer, by tag.
        metadata: of an activation, as it passed last or is known to pass.
        places: of the buffers into which its tensors were received last.
    """

    value: Value
    slot: Slot
    link: Connection
    buffers: Buffers
    starts: Mapping[Tag, Start]
    metadata: Metadata | None = field(default=None, init=False)
    places: dict[int, int] = field(default_factory=dict, init=False)

    def receive(self, forms: Iterable[Form], tag: Tag) -> list[Work]:
        """Begins to receive tensors into the slot."""
        start, take, places = self.starts[tag], self.buffers.take, self.places
        tensors, works = list[Tensor](), list[Work]()
        for index, form in enumerate(forms):
            tensor, places[index] = take(form, places.get(index, 0))
            tensors.append(tensor)
            works.append(start([tensor]))
        self.slot.tensors = tensors
        return works

    @abstractmethod
    def post(self) -> None:
        """Posts the receive of the value."""

    @abstractmethod
    def send(self) -> None:
        """Starts to send the value."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until a posted receive has arrived."""

    def release(self) -> None:
        """Frees what was sent. The program proves that the peer has received it, so the wait returns at once."""
        self.link.wait(self.slot.works)
        self.slot.works = []


@dataclass(slots=True, eq=False)
class GradientWire(Wire):
    """Of a gradient. Its receiver knows the shapes from `answered`, the wire of the activation that it sent."""

    answered: Wire

    def post(self) -> None:
        metadata = self.answered.metadata
        assert metadata is not None
        self.slot.works = self.receive(compress(metadata.forms, metadata.grads), Tag.GRADIENT)

    def wait(self) -> None:
        slot = self.slot
        self.link.wait(slot.works)
        slot.works = []
        for place, message in enumerate(slot.tensors):
            if is_marked(message):
                slot.tensors[place] = Unused.of(message)

    def send(self) -> None:
        slot, start = self.slot, self.starts[Tag.GRADIENT]
        for gradient in slot.take():
            if isinstance(gradient, Unused) and gradient.device.type != "cpu":
                _warn(self.value.stage)
            slot.works.append(start([to_message(gradient) if is_marked(gradient) else gradient]))


@cache
def _warn(stage: int) -> None:
    """Says once what is done to weights whose gradient does not exist."""
    LOG.warning(
        "stage %d did not use a value that it received, and between GPUs the gradient of such a value is zeros: weight "
        "decay and momentum move weights that lead to it alone, where plain torch has no gradient and leaves them. Use "
        "the value in each batch, for example times 0, or freeze these weights",
        stage,
    )


_AS_EXPECTED = torch.zeros(1, dtype=torch.int64, device="cpu")


@dataclass(slots=True, eq=False)
class ActivationWire(Wire):
    """Of an activation. Both ends see the same history, so they expect the same.

    Attributes:
        expectations: those of the rank.
        inbox: wires posted between this pair of ranks, in order. Waiting for one waits for those before, because their
            headers come first.
        expected: what the next activation is expected to be; None for anything.
        marked: the place of the tensor of the expected activation that begins with a mark if another one comes; None
            if its message cannot say so.
        pending: whether it is not read yet what has come.
    """

    expectations: Expectations
    inbox: deque[ActivationWire]
    expected: Metadata | None = None
    marked: int | None = None
    header: Tensor = field(default_factory=lambda: torch.empty(1, dtype=torch.int64, device="cpu"))
    pending: bool = False

    def _see(self, metadata: Metadata) -> None:
        """Records what passed. A shape that passes twice in a row is expected next time."""
        self.expected = metadata if metadata == self.metadata else None
        self.metadata, self.marked = metadata, None
        if self.expected is not None and self.buffers.device.type == "cpu":
            self.marked = next((place for place, form in enumerate(metadata.forms) if bears_mark(*form)), None)

    def send(self) -> None:
        """Sends the activation: on the channel where it is expected, or after its metadata on the channel for
        redirected activations.
        """
        slot, expected, known = self.slot, self.expected, self.expectations.known
        tag = Tag.ACTIVATION
        if expected is None or not expected.matches(slot, grads=self.expectations.promise is None):
            if known and expected is not None:
                raise self.expectations.broken(self.value, slot, expected)
            self._announce()
            tag = Tag.REDIRECTED
        elif self.marked is not None:
            if is_marked(slot.tensors[self.marked]):
                slot.tensors[self.marked] = to_message(slot.tensors[self.marked])
        elif not known:
            slot.works.append(self.starts[Tag.HEADER]([_AS_EXPECTED]))
        start = self.starts[tag]
        for tensor in slot.take():
            slot.works.append(start([tensor]))

    def _announce(self) -> None:
        """Sends the activation's metadata, and unused tensors to fill receives that were posted for another shape."""
        works, metadata, expected = self.slot.works, Metadata.of(self.slot), self.expected
        body = torch.frombuffer(bytearray(_packed(metadata)), dtype=torch.uint8)
        announce = self.starts[Tag.HEADER if self.marked is None else Tag.METADATA]
        works.append(announce([torch.tensor([len(body)], device="cpu")]))
        works.append(self.starts[Tag.METADATA]([body]))
        for shape, dtype in () if expected is None else expected.forms:
            filler = Unused.of(torch.empty(shape, dtype=dtype, device=self.buffers.device))
            works.append(self.starts[Tag.ACTIVATION]([to_message(filler)]))
        self._see(metadata)

    def post(self) -> None:
        """Posts the receive of the header, if there will be one, and of the activation if one is expected."""
        expected = self.expected
        if expected is None or (self.marked is None and not self.expectations.known):
            self.slot.works.append(self.starts[Tag.HEADER]([self.header]))
        if expected is not None:
            self.slot.works += self.receive(expected.forms, Tag.ACTIVATION)
        self.pending = True
        self.inbox.append(self)

    def wait(self) -> None:
        while self.pending:
            self.inbox.popleft()._arrive()

    def _arrive(self) -> None:
        """Reads what has come and, if it is not as expected, receives the activation now."""
        slot, starts, is_read = self.slot, self.starts, self.marked is None
        self.link.wait(slot.works)
        slot.works = []
        if self.marked is not None and is_marked(slot.tensors[self.marked]):
            self.link.wait([starts[Tag.METADATA]([self.header])])
            is_read = True
        if self.expected is None or (is_read and not self.expectations.known and self.header.item()):
            body = torch.empty(int(self.header), dtype=torch.uint8, device="cpu")
            self.link.wait([starts[Tag.METADATA]([body])])
            metadata = _unpacked(bytes(body.tolist()))
            self.link.wait(self.receive(metadata.forms, Tag.REDIRECTED))
            self._see(metadata)
        assert self.metadata is not None
        slot.spec, slot.grads = self.metadata.spec, self.metadata.grads
        self.pending = False


def tags_of(content: Content, *, promised: bool = False) -> Iterable[Tag]:
    """The tags with which a value of this content is sent; `promised` if the user promised the shape of activations."""
    if content is Content.GRADIENT:
        return (Tag.GRADIENT,)
    return (Tag.ACTIVATION,) if promised else (Tag.HEADER, Tag.METADATA, Tag.ACTIVATION, Tag.REDIRECTED)


def starts_of(transport: Transport, peer: int, tags: Iterable[Tag], *, receives: bool) -> dict[Tag, Start]:
    """What starts the transfers from a peer, or to it."""
    start = transport.receiver if receives else transport.sender
    return {tag: start(peer, tag) for tag in tags}


def _packed(metadata: Metadata) -> bytes:
    """`metadata` as bytes. Its tree is sent as a tree of numbers, because torch's TreeSpec cannot be packed."""
    tree = None if metadata.spec is None else tree_unflatten(range(len(metadata.forms)), metadata.spec)
    return pack((metadata.spec is None, tree, *metadata[1:]))


def _unpacked(body: bytes) -> Metadata:
    bare, tree, forms, grads = unpack(body)
    return Metadata(None if bare else tree_flatten(tree)[1], forms, grads)
