"""Program: the row of one rank with its sends and receives, as `lower` makes it and the engine runs it. Must not
contain: how either does that.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeflow.core.action import Entry
from pipeflow.core.dataflow import Value


@dataclass(frozen=True, slots=True)
class Recv:
    """Posts the receive of `value` from `peer`. The first Compute that needs the value waits for it."""

    value: Value
    peer: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Runs one entry of the row. An entry on another stream than the computations is only started; the program ends
    when all of them have ended.
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class Send:
    """Starts to send `value` to `peer`. The memory of the value is held until the matching Release."""

    value: Value
    peer: int


@dataclass(frozen=True, slots=True)
class Release:
    """Frees the memory of a sent `value`, at a point where the schedule proves that `peer` has received it, or at the
    end of the program.
    """

    value: Value
    peer: int


Instruction = Recv | Compute | Send | Release


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of one rank for one step.

    Attributes:
        rank: the rank that runs them.
        instructions: the instructions, in order.
        receive_buffers: the most received values that are alive at once, from the post of a receive to the last use of
            its value. A run allocates this many buffers.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    receive_buffers: int
