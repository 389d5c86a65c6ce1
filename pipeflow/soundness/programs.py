"""Verify programs: everything that is wrong with the sends and receives of a step, each with its place and the reason.
What they compute is the schedule's, and `verify`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from pipeflow.core.action import Action, Entry, actions_of
from pipeflow.core.dataflow import DATAFLOW, KEPT, PASSING, Content, Value, flows
from pipeflow.core.program import Compute, Program, Recv, Release, Send
from pipeflow.core.route import Routes
from pipeflow.core.violation import Violation
from pipeflow.soundness.deadlock import Place
from pipeflow.soundness.unbuffered import Table, waiting_for_ever


def verify_programs(programs: Sequence[Program], routes: Routes = ()) -> list[Violation]:
    """Every violation of the programs of a step, one a rank, for a pipeline with these `routes`; an empty list proves
    that their transfers are sound:

    - every value is made once and used once, on the rank that made it or on the one that it is sent to (without
      backwards, what forwards save is not used, and of weight gradients, those that a reduction waits for); but what is
      kept on a rank may be made again by another action, once it was used;
    - it is sent after it was made, released after it was sent, and received before it is used, each of them once;
    - between each ordered pair of ranks, the activations that one sends and those for which the other posts
      receives are the same, in the same order; and so for gradients;
    - no rank waits for ever, even where a send holds its rank until the receive is posted. This is asked of
      programs that are sound otherwise.

    The position of a violation is the index of an instruction.
    """
    table = _flows(programs, routes)
    made: dict[Value, Place] = {}
    ran: set[Action] = set()
    violations = [violation for program in programs for violation in _Walk(program, table, made, ran).violations()]
    return [*violations, *_mismatches(programs)] or list(waiting_for_ever(programs, table))


def _flows(programs: Sequence[Program], routes: Routes) -> Table:
    """The dataflow of as many stages as the programs compute; without backwards nothing is saved, and without
    reductions there are no weight gradients.
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
    if used & KEPT:  # with a backward all that it may need has to be used
        used |= KEPT | PASSING.keys()
    return {
        key: flow._replace(makes=tuple(end for end in flow.makes if end.content in used)) for key, flow in table.items()
    }


class _Walk:
    """One pass over a program, with where each value came from and what has become of it."""

    def __init__(self, program: Program, table: Table, made: dict[Value, Place], ran: set[Action]) -> None:
        self.program = program
        self.table = table
        self.made = made  # on all ranks so far
        self.ran = ran  # on all ranks so far
        self.kept: dict[Value, int] = {}  # made or received, and neither used nor sent yet
        self.known: set[Value] = set()  # made or received
        self.sent: dict[tuple[Value, int], int] = {}  # and not released yet

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
                            position, f"release of the {value}", f"that it was sent to rank {peer} and is not released"
                        )
        for value, position in self.kept.items():
            if value.content is Content.WEIGHT_GRADIENT:
                continue  # a later one of its stage is waited for
            yield self._wrong(position, f"the {value} is there", "that it is used or sent later")
        for (value, peer), position in self.sent.items():
            yield self._wrong(position, f"send of the {value} to rank {peer}", "that it is released later")

    def _wrong(self, position: int, problem: str, expected: str) -> Violation:
        return Violation(problem, expected, self.program.rank, position)

    def _compute(self, position: int, entry: Entry) -> Iterator[Violation]:
        actions = actions_of(entry)
        for action in actions:
            for end in self.table[action.kind, action.stage].needs:
                value = end.of(action.microbatch)
                if self.kept.pop(value, None) is None:
                    done = "used or sent before" if value in self.known else "neither made nor received before"
                    yield self._wrong(position, f"{action} needs the {value}, {done}", "that it is there, for one use")
        for action in actions:
            for end in self.table[action.kind, action.stage].makes:
                value = end.of(action.microbatch)
                back = end.content in KEPT and value not in self.kept and action not in self.ran
                if not back and (value in self.made or value in self.known):
                    yield self._wrong(position, f"{action} makes the {value} again", "every value made once")
                    continue
                self.made[value] = self.program.rank, position
                self.kept[value] = position
                self.known.add(value)
        self.ran.update(actions)

    def _recv(self, position: int, value: Value, peer: int) -> Iterator[Violation]:
        if value in self.known:
            yield self._wrong(position, f"receive of the {value} from rank {peer}, which is there", "every value once")
            return
        self.kept[value] = position
        self.known.add(value)

    def _send(self, position: int, value: Value, peer: int) -> Iterator[Violation]:
        maker, _ = self.made.get(value, (None, 0))
        if maker != self.program.rank or self.kept.pop(value, None) is None:
            done = "used or sent before" if maker == self.program.rank else "not made before"
            yield self._wrong(position, f"send of the {value} to rank {peer}, {done}", "that it was made for one use")
            return
        self.sent[value, peer] = position


Channel = tuple[int, int, Content]  # from, to, of what
Transfer = tuple[Value, int]  # and its position in the program


def _mismatches(programs: Sequence[Program]) -> Iterator[Violation]:
    """Per channel whose ends differ, the first transfer that does: at the receiver's, or where there is none, at
    the sender's.
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
    ends = f"sent is the {there[0] if there else 'end'}, received is the {here[0] if here else 'end'}"
    rank, position = (receiver, here[1]) if here else (sender, there[1] if there else 0)
    problem = f"{content.value} {index} from rank {sender} to rank {receiver}: {ends}"
    return Violation(problem, "both ends to list the same values in the same order", rank, position)
