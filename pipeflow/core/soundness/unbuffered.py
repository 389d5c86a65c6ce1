"""Unbuffered: whether programs run to their end if nothing is buffered. A transfer takes place once both its send and
its receive have been posted; a receive never holds its rank, a send may.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeflow.core.action import Kind, actions_of
from pipeflow.core.dataflow import AtStage, Value
from pipeflow.core.errors import Violation
from pipeflow.core.program import Compute, Instruction, Program, Recv, Release, Send
from pipeflow.core.soundness.waiting_cycles import Place, cycles

Table = Mapping[tuple[Kind, int], AtStage]


def waiting_for_ever(programs: Sequence[Program], table: Table) -> Iterator[Violation]:
    """Every cycle of instructions that wait for each other, if a send holds its rank until its receive is posted.
    Programs that run to their end under this rule also do so if a send holds only its channel.

    The values, and the order at both ends of each channel, must be sound already.
    """
    unbuffered = _UnbufferedRun(programs, table, (Send, Release))
    if not unbuffered.stuck:
        return
    loose = _UnbufferedRun(programs, table, (Release,))
    if loose.stuck:
        yield from loose.cycles("an order in which no instruction waits for itself")
    else:
        yield from unbuffered.cycles("an order that needs no buffers: here a send waits until its receive is posted")


class _UnbufferedRun:
    """The programs, run as far as they go. `holding` are the types of instruction that wait until the peer has posted
    the receive.
    """

    def __init__(self, programs: Sequence[Program], table: Table, holding: tuple[type[Instruction], ...]) -> None:
        self._steps = {program.rank: program.instructions for program in programs}
        self._table = table
        self._holding = holding
        self._at = dict.fromkeys(self._steps, 0)
        self._posted: set[Value] = set()
        self._started: set[Value] = set()
        self._waiting: dict[Value, int] = {}  # -> the rank that waits for its receive or its send
        ready = list(self._steps)
        while ready:
            ready += self._go(ready.pop())

    @property
    def stuck(self) -> list[Place]:
        return [(rank, position) for rank, position in self._at.items() if position < len(self._steps[rank])]

    def cycles(self, expected: str) -> Iterator[Violation]:
        places: dict[tuple[type[Instruction], Value], Place] = {}
        for rank, steps in self._steps.items():
            for position, step in enumerate(steps):
                if isinstance(step, (Recv, Send)):
                    places[type(step), step.value] = (rank, position)

        def waits_for(place: Place) -> Place:
            step = self._steps[place[0]][place[1]]
            awaited = self._awaited(step)
            assert awaited is not None
            return places[Send if isinstance(step, Compute) else Recv, awaited]

        for found in cycles(self.stuck, waits_for):
            chain = " -> ".join(f"{_text(self._steps[rank][position])} (rank {rank})" for rank, position in found.chain)
            yield Violation(f"deadlock: {chain}", expected, *found.stuck[0], tuple(found.chain[:-1]))

    def _go(self, rank: int) -> list[int]:
        """Runs a rank until it waits. Returns the ranks that can go on because of that."""
        woken: list[int] = []
        steps, waiting = self._steps[rank], self._waiting
        for position in range(self._at[rank], len(steps)):
            step = steps[position]
            if not isinstance(step, (Compute, Release)):
                (self._posted if isinstance(step, Recv) else self._started).add(step.value)
                if step.value in waiting:
                    woken.append(waiting.pop(step.value))
            awaited = self._awaited(step)
            if awaited is not None:
                waiting[awaited] = rank
                self._at[rank] = position
                return woken
        self._at[rank] = len(steps)
        return woken

    def _awaited(self, step: Instruction) -> Value | None:
        """The value that `step` waits for because its other end has not begun yet; None if it need not wait."""
        if isinstance(step, Compute):
            for action in actions_of(step.entry):
                for end in self._table[action.kind, action.stage].needs:
                    value = end.of(action.microbatch)
                    if value in self._posted and value not in self._started:
                        return value
        elif isinstance(step, self._holding) and step.value not in self._posted:
            return step.value
        return None


def _text(step: Instruction) -> str:
    match step:
        case Compute(entry):
            return str(entry)
        case Recv(value, _):
            return f"receive of the {value}"
        case Send(value, _):
            return f"send of the {value}"
        case Release(value, _):
            return f"release of the {value}"
