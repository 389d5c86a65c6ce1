"""Running: calls operations one after the other, and finds the action or transfer in which an error happened."""

from __future__ import annotations

from collections.abc import Sequence

from pipeflow.core.action import Action, Kind
from pipeflow.core.dataflow import Content
from pipeflow.engine.parallel.failure import ActionError
from pipeflow.engine.parallel.transport.protocol import LinkError
from pipeflow.engine.runtime.program.operations import ComputeOperation, Operation
from pipeflow.engine.runtime.program.transfers import ChannelOperation


def run(operations: Sequence[Operation]) -> None:
    """Calls the operations one after the other. Raises ActionError or LinkError, which say where an error happened."""
    operation: Operation | None = None
    try:
        for operation in operations:
            operation()
    except BaseException as error:
        match operation:
            case ChannelOperation() if isinstance(lost := operation.link.lost(error), LinkError):
                raise lost.during(f"{operation.doing} the {operation.value}") from None
            case _ if isinstance(error, ActionError | LinkError):
                raise
            case ChannelOperation(value=value):
                kind = Kind.F if value.content is Content.ACTIVATION else Kind.B
                raise ActionError(Action(kind, value.stage, value.microbatch)) from error
            case ComputeOperation(action=action):
                raise ActionError(action) from error
            case _:
                raise
