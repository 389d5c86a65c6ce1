"""Operations: what a step calls one after the other, and what runs beside the computations. Must not contain: what they
compute and transfer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from pipeflow.core.action import Action, Kind, Pair
from pipeflow.core.dataflow import Content, Value
from pipeflow.engine.parallel.failure import ActionError
from pipeflow.engine.parallel.transport.protocol import LinkError, Work
from pipeflow.engine.runtime.program.wires import Wire


class Doing(Enum):
    """What an operation does with its action or value."""

    COMPUTE = "computing"
    BEGIN = "beginning"  # an action beside the computations
    END = "awaiting"  # such an action
    POST = "posting the receive of"
    WAIT = "waiting for"
    SEND = "sending"
    RELEASE = "handing over"
    SWITCH = "switching"


class Operation(NamedTuple):
    """A single operation of a rank in a step.

    Attributes:
        call: does it.
        doing: what it does.
        what: the action that it runs, or the value that it transfers.
        by: the wire, or the action beside the computations, or the pair that it runs.
    """

    call: Callable[[], object]
    doing: Doing
    what: Action | Value | None = None
    by: Wire | Beside | Pair | None = None


def compute(action: Action, call: Callable[[], object]) -> Operation:
    """The operation of a computation; a timeline measures it."""
    return Operation(call, Doing.COMPUTE, action)


def begin(beside: Beside) -> Operation:
    """The operation that starts an action beside the computations."""
    return Operation(beside.start, Doing.BEGIN, by=beside)


def end(beside: Beside) -> Operation:
    """The operation that waits for such an action."""
    return Operation(beside.end, Doing.END, beside.action, beside)


def run(operations: Sequence[Operation]) -> None:
    """Calls the operations one after the other. Raises ActionError or LinkError, which say where an error happened."""
    operation: Operation | None = None
    try:
        for operation in operations:
            operation.call()
    except BaseException as error:
        match operation:
            case Operation(by=Wire() as wire) if isinstance(lost := wire.link.lost(error), LinkError):
                raise lost.during(f"{operation.doing.value} the {operation.what}") from None
            case Operation(what=Action() as action) if not isinstance(error, ActionError | LinkError):
                raise ActionError(action) from error
            case Operation(what=Value() as value) if not isinstance(error, ActionError | LinkError):
                kind = Kind.F if value.content is Content.ACTIVATION else Kind.B
                raise ActionError(Action(kind, value.stage, value.microbatch)) from error
            case _:
                raise


@dataclass(eq=False)
class Beside(ABC):
    """An action that is started in its place and then runs beside the following operations until its works are done.
    `after` has the actions on other streams whose values it needs.
    """

    action: Action
    after: list[Beside] = field(default_factory=list, init=False)
    works: list[Work] = field(default_factory=list, init=False)

    def start(self) -> None:
        self.works = self.begin()

    @abstractmethod
    def begin(self) -> list[Work]:
        """Starts the action and returns the works under way."""

    def end(self) -> None:
        """Waits until the action is done."""
        for work in self.works:
            work.wait()
        self.works = []


@dataclass(frozen=True, slots=True)
class Awaited:
    """A Work for which a function waits."""

    wait: Callable[[], object]


@dataclass(eq=False)
class Unawaited(Beside):
    """An action for which no operation waits: R, whose sums end with the step, when all gradients are written back; and
    H, which is done at once. `call` starts it, and may return its works.
    """

    call: Callable[[], list[Work] | None]

    def begin(self) -> list[Work]:
        return self.call() or []

    def end(self) -> None:
        self.works = []
