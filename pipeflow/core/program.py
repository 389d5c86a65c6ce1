"""Program: one rank's row with its sends and receives. Made by `lower`, run by the executor."""

from __future__ import annotations

from dataclasses import dataclass

from pipeflow.core.action import Entry
from pipeflow.core.dataflow import Value


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive of `value` from `peer`; it is waited for by the first compute that needs it."""

    value: Value
    peer: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one entry of the row; what runs beside computations is only begun, and the program ends when it has ended."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending `value` to `peer`; its memory is held until the matching Release."""

    value: Value
    peer: int


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of a sent `value`: the schedule proves that `peer` has it, or the program ends."""

    value: Value
    peer: int


Instruction = Recv | Compute | Send | Release


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does in a step, in order.

    `receive_buffers` is the most received values that are alive at once: posted, and not yet used for the
    last time. It is what a run allocates.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    receive_buffers: int
