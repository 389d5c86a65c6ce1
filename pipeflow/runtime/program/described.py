"""Transfers of activations whose shape is not known beforehand: a header travels with each, and says whether the
activation is what its receiver posted for. What was seen twice in a row is posted for ahead.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeflow.core.dataflow import Value
from pipeflow.parallel.transport.plain import pack, unpack
from pipeflow.parallel.transport.protocol import Lane, Start, Transport
from pipeflow.parallel.transport.work import Link
from pipeflow.runtime.program.cells import Cell, Meta
from pipeflow.runtime.program.transfers import Transfer


class Expectation:
    """What both ends expect of one value next step; they see the same, so they expect the same."""

    __slots__ = ("expected", "last")

    def __init__(self) -> None:
        self.expected: Meta | None = None
        self.last: Meta | None = None

    def see(self, meta: Meta) -> None:
        """Takes note of what came: what comes twice in a row is expected again."""
        self.expected = meta if meta == self.last else None
        self.last = meta


class Lanes(NamedTuple):
    """One end of the four lanes that described activations between an ordered pair of ranks use."""

    header: Start
    description: Start
    expected: Start
    redirected: Start

    @classmethod
    def sending(cls, transport: Transport, peer: int) -> Lanes:
        return cls(*(transport.sender(peer, lane) for lane in _LANES))

    @classmethod
    def receiving(cls, transport: Transport, peer: int) -> Lanes:
        return cls(*(transport.receiver(peer, lane) for lane in _LANES))


_LANES = (Lane.HEADER, Lane.DESCRIPTION, Lane.ACTIVATION, Lane.REDIRECTED)


class SendDescribed(Transfer):
    """Sends the header, then the activation: on the lane it is expected on, or described and redirected."""

    __slots__ = ("expectation", "lanes", "meta")

    doing = "sending"
    meta: Meta
    """Of what was sent last."""

    def __init__(self, value: Value, link: Link, cell: Cell, lanes: Lanes) -> None:
        super().__init__(value, link, cell)
        self.lanes = lanes
        self.expectation = Expectation()

    def __call__(self) -> None:
        cell, expected = self.cell, self.expectation.expected
        if expected is not None and expected.describes(cell.tensors, cell.spec, cell.grads):
            cell.works.append(self.lanes.header([_AS_EXPECTED]))
            lane = self.lanes.expected
        else:
            self._describe(expected)
            lane = self.lanes.redirected
        for tensor in cell.tensors:
            cell.works.append(lane([tensor]))
        cell.tensors = []

    def _describe(self, expected: Meta | None) -> None:
        """Sends what the activation looks like, and something to fill the receives that were posted in vain."""
        cell, works = self.cell, self.cell.works
        meta = self.meta = Meta.of(cell.tensors, cell.spec, cell.grads)
        body = torch.frombuffer(bytearray(_packed(meta)), dtype=torch.uint8)
        works.append(self.lanes.header([torch.tensor([len(body)], device="cpu")]))
        works.append(self.lanes.description([body]))
        for tensor in expected.empty(cell.tensors[0].device) if expected is not None else ():
            works.append(self.lanes.expected([tensor]))
        self.expectation.see(meta)


_AS_EXPECTED = torch.zeros(1, dtype=torch.int64, device="cpu")


def _packed(meta: Meta) -> bytes:
    """`meta` as bytes. Its tree goes as a tree of numbers: torch's own description of one is not made to travel."""
    tree = None if meta.spec is None else tree_unflatten(range(len(meta.shapes)), meta.spec)
    return pack((meta.spec is None, tree, *meta[1:]))


def _unpacked(body: bytes) -> Meta:
    bare, tree, shapes, dtypes, grads = unpack(body)
    return Meta(None if bare else tree_flatten(tree)[1], shapes, dtypes, grads)


class Arrival:
    """An activation on its way: the cell it will fill, and its header. `pending` until the header was read."""

    __slots__ = ("cell", "device", "expectation", "header", "lanes", "pending")

    def __init__(self, cell: Cell, lanes: Lanes, device: torch.device) -> None:
        self.cell = cell
        self.lanes = lanes
        self.device = device
        self.expectation = Expectation()
        self.header = torch.empty(1, dtype=torch.int64, device="cpu")
        self.pending = False


class PostDescribed(Transfer):
    """Posts the receive of a header, and of the activation where one is expected."""

    __slots__ = ("arrival", "inbox")

    doing = "posting the receive of"

    def __init__(self, value: Value, link: Link, arrival: Arrival, inbox: deque[Arrival]) -> None:
        super().__init__(value, link, arrival.cell)
        self.arrival = arrival
        self.inbox = inbox  # what was posted between this pair of ranks, in order

    def __call__(self) -> None:
        arrival, cell = self.arrival, self.cell
        lanes, expected = arrival.lanes, arrival.expectation.expected
        cell.works = [lanes.header([arrival.header])]
        cell.tensors = []
        for shape, dtype in zip(expected.shapes, expected.dtypes, strict=True) if expected is not None else ():
            tensor = torch.empty(shape, dtype=dtype, device=arrival.device)
            cell.tensors.append(tensor)
            cell.works.append(lanes.expected([tensor]))
        arrival.pending = True
        self.inbox.append(arrival)


class WaitDescribed(Transfer):
    """Waits for what was posted between this pair of ranks, in order, up to and with its own value. Reads each header
    and, unless the activation is the expected one, receives it now.
    """

    __slots__ = ("arrival", "inbox")

    doing = "waiting for"

    def __init__(self, value: Value, link: Link, arrival: Arrival, inbox: deque[Arrival]) -> None:
        super().__init__(value, link, arrival.cell)
        self.arrival = arrival
        self.inbox = inbox

    def __call__(self) -> None:
        while self.arrival.pending:
            arrival = self.inbox.popleft()
            cell, expectation = arrival.cell, arrival.expectation
            self.link.wait(cell.works)
            cell.works = []
            if length := int(arrival.header):
                expectation.see(self._redirected(arrival, length))
            assert expectation.last is not None
            cell.spec, cell.grads = expectation.last.spec, expectation.last.grads
            arrival.pending = False

    def _redirected(self, arrival: Arrival, length: int) -> Meta:
        """Receives what is not what was expected."""
        body = torch.empty(length, dtype=torch.uint8, device="cpu")
        self.link.wait([arrival.lanes.description([body])])
        meta = _unpacked(bytes(body.tolist()))
        arrival.cell.tensors = meta.empty(arrival.device)
        self.link.wait([arrival.lanes.redirected([tensor]) for tensor in arrival.cell.tensors])
        return meta
