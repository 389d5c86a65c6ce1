"""Running: one operation after the other, and which action or transfer an error happened in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import PipeflowError
from pipeflow.parallel.failure import ActionError
from pipeflow.parallel.transport.protocol import Transport
from pipeflow.parallel.transport.work import LinkError
from pipeflow.runtime.program.operations import Compute, Operation
from pipeflow.runtime.program.transfers import Transfer


def run(operations: Sequence[Operation], transport: Transport) -> None:
    """Calls one operation after the other. Raises ActionError or LinkError, which say where it went wrong."""
    operation: Operation | None = None
    try:
        for operation in operations:
            operation()
    except BaseException as error:
        match operation:
            case _ if isinstance(error, ActionError | LinkError):
                raise
            case Transfer() if _is_of_channel(error):
                peer = transport.world_rank(operation.peer)
                raise LinkError(peer, f"{operation.doing} the {operation.value}", error) from None
            case Transfer(value=value):
                kind = Kind.F if value.content is Content.ACTIVATION else Kind.B
                raise ActionError(Action(kind, value.stage, value.microbatch)) from error
            case Compute(action=action):
                raise ActionError(action) from error
            case _:
                raise


def _is_of_channel(error: BaseException) -> bool:
    """Whether a transfer failed for its channel's sake. Channels raise RuntimeError; so do some that are no channel."""
    return isinstance(error, RuntimeError) and not isinstance(error, PipeflowError | torch.OutOfMemoryError)
