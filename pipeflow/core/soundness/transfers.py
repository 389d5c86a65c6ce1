"""Verify programs: everything that is wrong with the sends and receives of a step, with place and reason. Must not
contain: checks of what is computed, which `verify` does on the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from pipeflow.core.action import Action, Entry, Kind, actions_of
from pipeflow.core.dataflow import ACROSS, DATAFLOW, KEPT, PASSING, AtStage, Content, Value, flows
from pipeflow.core.errors import Violation
from pipeflow.core.program import Compute, Instruction, Program, Recv, Release, Send
from pipeflow.core.route import Routes
from pipeflow.core.schedule import slices_of
from pipeflow.core.soundness.deadlock_search import Place, cycles


def verify_programs(programs: Sequence[Program], routes: Routes = ()) -> list[Violation]:
    """Every violation of the programs of a step, one program per rank, in a pipeline with these `routes`. An empty list
    proves that their transfers are sound:

    - Every value is made once and used once, on the rank that made it or on the one that it is sent to. A kept value
      may be made again by another action after its use. Without backwards, values saved by forwards need no use; weight
      gradients before the one that a reduction waits for never do.
    - It is sent after it was made, released after it was sent, and received before it is used, each of these once.
    - Between each ordered pair of ranks, the activations that one rank sends are those for which the other one posts
      receives, in the same order. The same holds for gradients.
    - No rank waits for ever, even if a send holds its rank until the receive is posted. This is checked only if nothing
      else is wrong.

    The position of a violation is the index of an instruction.
    """
    table = _flows(programs, routes)
    made: dict[Value, Place] = {}
    ran: set[Action] = set()
    violations = [violation for program in programs for violation in _Walk(program, table, made, ran).violations()]
    return [*violations, *_mismatches(programs)] or list(waiting_for_ever(programs, table))


def _flows(programs: Sequence[Program], routes: Routes) -> Table:
    """The dataflow table for as many stages as the programs compute, without values that no action of theirs uses:
    saved values without backwards, and weight gradients without reductions.
    """
    actions = [
        action
        for program in programs
        for step in program.instructions
        if isinstance(step, Compute)
        for action in actions_of(step.entry)
    ]
    kinds = {(action.kind, action.stage) for action in actions}
    table = flows(max((stage for _, stage in kinds), default=-1) + 1, routes, slices_of(actions))
    used = {content for kind, _ in kinds for content, _ in (*DATAFLOW[kind].needs, *DATAFLOW[kind].across)}
    if used & KEPT:  # with backwards, all values that they may need have to be used
        used |= KEPT | PASSING.keys() | ACROSS.keys()
    return {
        key: flow._replace(makes=tuple(end for end in flow.makes if end.content in used)) for key, flow in table.items()
    }


class _Walk:
    """One pass over a program, with the origin of each value and what has happened to it so far."""

    def __init__(self, program: Program, table: Table, made: dict[Value, Place], ran: set[Action]) -> None:
        self.program = program
        self.table = table
        self.made = made  # on all ranks visited so far
        self.ran = ran  # on all ranks visited so far
        self.kept: dict[Value, int] = {}  # made or received, but neither used nor sent yet
        self.known: set[Value] = set()  # made or received
        self.sent: dict[tuple[Value, int], int] = {}  # sent and not released yet

    def violations(self) -> Iterator[Violation]:
        for position, step in enumerate(self.program.instructions):
            match step:
                case Compute(entry):
                    yield from self._compute(position, entry)
                case Recv(value, peer):
                    yield from self._recv(position, value, peer)
                case Send(value, peer):
                    yield from self._send(position, value, peer)
                case Release(value, peer):
                    if self.sent.pop((value, peer), None) is None:
                        yield self._wrong(
                            position, f"release of the {value}", f"a send of it to rank {peer} that is not released yet"
                        )
        for value, position in self.kept.items():
            if value.content is Content.WEIGHT_GRADIENT:
                continue  # a reduction waits for a later one of the same stage
            yield self._wrong(position, f"the {value} is never used", "a later use or send of it")
        for (value, peer), position in self.sent.items():
            yield self._wrong(position, f"send of the {value} to rank {peer}", "a later release of it")

    def _wrong(self, position: int, problem: str, expected: str) -> Violation:
        return Violation(problem, expected, self.program.rank, position)

    def _compute(self, position: int, entry: Entry) -> Iterator[Violation]:
        actions = actions_of(entry)
        for action in actions:
            for end in self.table[action.kind, action.stage, action.slice].needs:
                value = end.of(action.microbatch)
                if self.kept.pop(value, None) is None:
                    done = "already used or sent" if value in self.known else "neither made nor received before"
                    yield self._wrong(position, f"{action} needs the {value}, {done}", "every value there for its use")
        for action in actions:
            needs, makes = self.table[action.kind, action.stage, action.slice]
            for end in makes:
                value = end.of(action.microbatch)
                back = (end.content in KEPT or end in needs) and value not in self.kept and action not in self.ran
                if not back and (value in self.made or value in self.known):
                    yield self._wrong(position, f"{action} makes the {value} again", "every value made once")
                    continue
                self.made[value] = self.program.rank, position
                self.kept[value] = position
                self.known.add(value)
        self.ran.update(actions)

    def _recv(self, position: int, value: Value, peer: int) -> Iterator[Violation]:
        if value in self.known:
            yield self._wrong(position, f"receive of the {value} from rank {peer}, already there", "every value once")
            return
        self.kept[value] = position
        self.known.add(value)

    def _send(self, position: int, value: Value, peer: int) -> Iterator[Violation]:
        maker, _ = self.made.get(value, (None, 0))
        if maker != self.program.rank or self.kept.pop(value, None) is None:
            done = "already used or sent" if maker == self.program.rank else "not made before"
            yield self._wrong(position, f"send of the {value} to rank {peer}, {done}", "every value there for its send")
            return
        self.sent[value, peer] = position


Channel = tuple[int, int, Content]  # from rank, to rank, content
Transfer = tuple[Value, int]  # value, position in the program


def _mismatches(programs: Sequence[Program]) -> Iterator[Violation]:
    """Per channel whose two ends differ, the first transfer that does: at the receiver's instruction, or at the
    sender's if the receiver has none.
    """
    sent: dict[Channel, list[Transfer]] = {}
    received: dict[Channel, list[Transfer]] = {}
    for program in programs:
        for position, step in enumerate(program.instructions):
            match step:
                case Send(value, peer):
                    sent.setdefault((program.rank, peer, value.content), []).append((value, position))
                case Recv(value, peer):
                    received.setdefault((peer, program.rank, value.content), []).append((value, position))
                case _:
                    pass
    for channel in sorted({*sent, *received}):
        ends = zip_longest(sent.get(channel, []), received.get(channel, []), fillvalue=None)
        for index, (there, here) in enumerate(ends):
            if there is None or here is None or there[0] != here[0]:
                yield _mismatch(channel, index, there, here)
                break


def _mismatch(channel: Channel, index: int, there: Transfer | None, here: Transfer | None) -> Violation:
    sender, receiver, content = channel
    sends, takes = (f"the {end[0]}" if end else "nothing" for end in (there, here))
    rank, position = (receiver, here[1]) if here else (sender, there[1] if there else 0)
    problem = f"{content.value} {index}: rank {sender} sends {sends}, rank {receiver} receives {takes}"
    return Violation(problem, "the same values in the same order at both ends", rank, position)


Table = Mapping[tuple[Kind, int, int | None], AtStage]


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
                for end in self._table[action.kind, action.stage, action.slice].needs:
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
