"""The transfers of a compiled program, for values whose looks are known beforehand. A receive is posted, then waited
for; a send is started, then released. Activations of unknown shape are in `described`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pipeflow.core.dataflow import Value
from pipeflow.core.errors import UsageError
from pipeflow.parallel.transport.protocol import Start
from pipeflow.parallel.transport.work import Link
from pipeflow.runtime.program.cells import Cell, Meta
from pipeflow.runtime.program.operations import Operation


class Transfer(Operation):
    """An operation on a channel, whose `link` waits and reads its errors. `doing` says in one what it was about."""

    __slots__ = ("cell", "link", "value")

    doing: str

    def __init__(self, value: Value, link: Link, cell: Cell) -> None:
        self.value = value
        self.link = link
        self.cell = cell


class Post(Transfer):
    """Posts the receive of an activation whose shape was given."""

    __slots__ = ("device", "dtype", "shape", "start")

    doing = "posting the receive of"

    def __init__(self, value: Value, link: Link, cell: Cell, start: Start, meta: Meta, device: torch.device) -> None:
        super().__init__(value, link, cell)
        self.start = start
        [self.shape] = meta.shapes
        [self.dtype] = meta.dtypes
        self.device = device

    def __call__(self) -> None:
        cell = self.cell
        cell.tensors = [torch.empty(self.shape, dtype=self.dtype, device=self.device)]
        cell.works = [self.start(cell.tensors)]


class PostGradient(Transfer):
    """Posts the receive of a gradient, which looks like the activation that was sent."""

    __slots__ = ("device", "sent", "start")

    doing = "posting the receive of"

    def __init__(
        self, value: Value, link: Link, cell: Cell, start: Start, sent: Described, device: torch.device
    ) -> None:
        super().__init__(value, link, cell)
        self.start = start
        self.sent = sent
        self.device = device

    def __call__(self) -> None:
        cell, meta = self.cell, self.sent.meta
        for shape, dtype, wanted in zip(meta.shapes, meta.dtypes, meta.grads, strict=True):
            if wanted:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                cell.tensors.append(tensor)
                cell.works.append(self.start([tensor]))


class Described(Protocol):
    """A send that knows what its activation looks like."""

    @property
    def meta(self) -> Meta: ...


class Wait(Transfer):
    """Waits until a posted receive is there."""

    __slots__ = ()

    doing = "waiting for"

    def __call__(self) -> None:
        cell = self.cell
        self.link.wait(cell.works)
        cell.works = []


class Send(Transfer):
    """Starts to send an activation whose shape was given, having checked it: a channel would not."""

    __slots__ = ("meta", "start")

    doing = "sending"

    def __init__(self, value: Value, link: Link, cell: Cell, start: Start, meta: Meta) -> None:
        super().__init__(value, link, cell)
        self.start = start
        self.meta = meta

    def __call__(self) -> None:
        cell, meta = self.cell, self.meta
        if len(cell.tensors) != 1 or cell.spec is not None:
            raise UsageError("with tensor_shape a stage returns one tensor; leave it None for anything else")
        [tensor] = cell.tensors
        if tensor.shape != meta.shapes[0] or tensor.dtype != meta.dtypes[0]:
            raise UsageError(
                f"stage {self.value.stage} made a {tensor.dtype} of shape {tuple(tensor.shape)}, but tensor_shape="
                f"{tuple(meta.shapes[0])} and tensor_dtype={meta.dtypes[0]} were promised: correct them, or leave "
                "tensor_shape None"
            )
        cell.works = [self.start(cell.tensors)]
        cell.tensors = []


class SendGradient(Transfer):
    """Starts to send a gradient; its receiver knows what it looks like."""

    __slots__ = ("start",)

    doing = "sending"

    def __init__(self, value: Value, link: Link, cell: Cell, start: Start) -> None:
        super().__init__(value, link, cell)
        self.start = start

    def __call__(self) -> None:
        cell = self.cell
        for tensor in cell.tensors:
            cell.works.append(self.start([tensor]))
        cell.tensors = []


class Release(Wait):
    """Lets go of a sent value: the plan proves that the peer has it, so the wait is none."""

    __slots__ = ()

    doing = "handing over"
