"""The transfers of a compiled program, for values of known shape and dtype. A receive is posted, then waited for; a
send is started, then released. Must not contain: activations of unknown shape, which are in `dynamic_shapes`.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import torch

from pipeflow.core.dataflow import Value
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.protocol import Connection, Start
from pipeflow.engine.runtime.program.operations import Operation
from pipeflow.engine.runtime.program.payload import Metadata, Payload
from pipeflow.engine.runtime.program.unused import Unused, from_message, to_message

LOG = logging.getLogger("pipeflow")


class ChannelOperation(Operation):
    """An operation on a channel. `link` waits and interprets errors; `doing` describes the operation in an error."""

    __slots__ = ("link", "payload", "value")

    doing: str

    def __init__(self, value: Value, link: Connection, payload: Payload) -> None:
        self.value = value
        self.link = link
        self.payload = payload


class PostActivation(ChannelOperation):
    """Posts the receive of an activation of known shape."""

    __slots__ = ("device", "dtype", "shape", "start")

    doing = "posting the receive of"
    shape: torch.Size
    dtype: torch.dtype

    def __init__(self, value: Value, link: Connection, payload: Payload, start: Start, device: torch.device) -> None:
        super().__init__(value, link, payload)
        self.start = start
        self.device = device

    def expect(self, metadata: Metadata) -> None:
        """Sets the expected shape and dtype. Called before the first step, and when microbatches change in size."""
        [self.shape] = metadata.shapes
        [self.dtype] = metadata.dtypes
        self.payload.grads = metadata.grads

    def __call__(self) -> None:
        payload = self.payload
        payload.tensors = [torch.empty(self.shape, dtype=self.dtype, device=self.device)]
        payload.works = [self.start(payload.tensors)]


class PostGradient(ChannelOperation):
    """Posts the receive of a gradient, which has the shape of the activation that was sent."""

    __slots__ = ("device", "sent", "start")

    doing = "posting the receive of"

    def __init__(
        self, value: Value, link: Connection, payload: Payload, start: Start, sent: SentActivation, device: torch.device
    ) -> None:
        super().__init__(value, link, payload)
        self.start = start
        self.sent = sent
        self.device = device

    def __call__(self) -> None:
        payload, metadata = self.payload, self.sent.metadata
        for shape, dtype, wanted in zip(metadata.shapes, metadata.dtypes, metadata.grads, strict=True):
            if wanted:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                payload.tensors.append(tensor)
                payload.works.append(self.start([tensor]))


class SentActivation(Protocol):
    """A send that knows the metadata of its activation."""

    @property
    def metadata(self) -> Metadata: ...


class AwaitReceive(ChannelOperation):
    """Waits until a posted receive has arrived."""

    __slots__ = ()

    doing = "waiting for"

    def __call__(self) -> None:
        payload = self.payload
        self.link.wait(payload.works)
        payload.works = []


class AwaitGradient(AwaitReceive):
    """Waits until the gradients of a value have arrived."""

    __slots__ = ()

    def __call__(self) -> None:
        payload = self.payload
        self.link.wait(payload.works)
        payload.works = []
        payload.tensors = [from_message(message) for message in payload.tensors]


class SendActivation(ChannelOperation):
    """Starts to send an activation of known shape. Checks its shape first, because a channel does not."""

    __slots__ = ("metadata", "start")

    doing = "sending"
    metadata: Metadata

    def __init__(self, value: Value, link: Connection, payload: Payload, start: Start) -> None:
        super().__init__(value, link, payload)
        self.start = start

    def expect(self, metadata: Metadata) -> None:
        """Sets the only shape and dtype to send. Called before the first step, and when microbatches change in size."""
        self.metadata = metadata

    def __call__(self) -> None:
        payload, metadata = self.payload, self.metadata
        if len(payload.tensors) != 1 or payload.spec is not None:
            raise UsageError("with tensor_shape, a stage must return one tensor: leave it None for other outputs")
        [tensor] = payload.tensors
        if tensor.shape != metadata.shapes[0] or tensor.dtype != metadata.dtypes[0]:
            raise UsageError(
                f"stage {self.value.stage} returned a {tensor.dtype} of shape {tuple(tensor.shape)}, but tensor_shape="
                f"{tuple(metadata.shapes[0])} and tensor_dtype={metadata.dtypes[0]} were given: correct them, "
                "make the first entry None if microbatches differ in size, or leave tensor_shape None"
            )
        payload.works = [self.start(payload.tensors)]
        payload.tensors = []


class SendGradient(ChannelOperation):
    """Starts to send a gradient; its receiver knows the shape."""

    __slots__ = ("start",)

    doing = "sending"

    def __init__(self, value: Value, link: Connection, payload: Payload, start: Start) -> None:
        super().__init__(value, link, payload)
        self.start = start

    def __call__(self) -> None:
        payload = self.payload
        for gradient in payload.tensors:
            if isinstance(gradient, Unused) and gradient.device.type != "cpu":
                _warn(self.value.stage)
            payload.works.append(self.start([to_message(gradient)]))
        payload.tensors = []


@cache
def _warn(stage: int) -> None:
    """Says once what is done to weights whose gradient does not exist."""
    LOG.warning(
        "stage %d did not use a value that it received, and between GPUs the gradient of such a value is zeros: weight "
        "decay and momentum move weights that lead to it alone, where plain torch has no gradient and leaves them. Use "
        "the value in each batch, for example times 0, or freeze these weights",
        stage,
    )


class ReleaseSent(AwaitReceive):
    """Frees a sent value. The program proves that the peer has received it, so the wait returns at once."""

    __slots__ = ()

    doing = "handing over"
