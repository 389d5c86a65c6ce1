"""Context: this process's place among the others. The one state that a process keeps, as torch keeps its default
process group; in a context variable, so that ranks may be threads.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import nn

from pipeflow.core.errors import UsageError
from pipeflow.runtime.failure import Alarm
from pipeflow.runtime.transport import Transport


@dataclass(eq=False)
class SharedWeight:
    """A weight that `ranks` share, with the copies that this rank registered, each a list of parameters: one copy, but
    for a weight of a single rank, whose further copies become the first. It keeps no parameter alive.
    """

    ranks: tuple[int, ...]
    copies: list[list[ref[nn.Parameter]]] = field(default_factory=list)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The first copy; empty when it was not registered, or is gone."""
        found = [reference() for reference in self.copies[0]] if self.copies else []
        return [parameter for parameter in found if parameter is not None]


@dataclass(eq=False)
class Context:
    """This process's place: its rank in the world and in its pipeline, and the pipeline's transport."""

    rank: int
    world_size: int
    pipeline_rank: int
    pipeline_size: int
    device: torch.device
    transport: Transport
    shared: list[SharedWeight] = field(default_factory=list)
    alarm: Alarm = field(init=False)

    def __post_init__(self) -> None:
        self.alarm = Alarm(self.transport)


_context: ContextVar[Context] = ContextVar("pipeflow.context")


def current_context() -> Context:
    """The context that `launch` set. Raises UsageError when there is none."""
    try:
        return _context.get()
    except LookupError:
        raise UsageError("there is no context: call pipeflow.launch(pipeline=...) first") from None


def set_context(context: Context) -> None:
    """Makes `context` this thread's; for launchers other than `launch`."""
    _context.set(context)
