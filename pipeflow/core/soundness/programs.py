"""Verify programs: everything that is wrong with the sends and receives of a step, with place and reason. Must not
contain: checks of what is computed, which `verify` does on the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from pipeflow.core.action import Action, Entry, actions_of
from pipeflow.core.dataflow import DATAFLOW, KEPT, PASSING, Content, Value, flows
from pipeflow.core.errors import Violation
from pipeflow.core.program import Compute, Program, Recv, Release, Send
from pipeflow.core.route import Routes
from pipeflow.core.soundness.unbuffered import Table, waiting_for_ever
from pipeflow.core.soundness.waiting_cycles import Place


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
    kinds = {
        (action.kind, action.stage)
        for program in programs
        for step in program.instructions
        if isinstance(step, Compute)
        for action in actions_of(step.entry)
    }
    table = flows(max((stage for _, stage in kinds), default=-1) + 1, routes)
    used = {content for kind, _ in kinds for content, _ in DATAFLOW[kind].needs}
    if used & KEPT:  # with backwards, all values that they may need have to be used
        used |= KEPT | PASSING.keys()
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
            for end in self.table[action.kind, action.stage].needs:
                value = end.of(action.microbatch)
                if self.kept.pop(value, None) is None:
                    done = "already used or sent" if value in self.known else "neither made nor received before"
                    yield self._wrong(position, f"{action} needs the {value}, {done}", "every value there for its use")
        for action in actions:
            needs, makes = self.table[action.kind, action.stage]
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
