"""Verify: everything that is wrong with a schedule, or with its programs, each with its place and the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pipeflow.analysis.graph import dependency_graph
from pipeflow.analysis.order import Order
from pipeflow.core.action import Action, Kind, actions_of
from pipeflow.core.dataflow import Content, Value
from pipeflow.core.program import Program, Recv, Send
from pipeflow.core.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong. `rank` and `position` (an index into the rank's row) say where, when there is a
    place; `problem` says what is there, `expected` what should be.
    """

    problem: str
    expected: str
    rank: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", position {self.position}"
        return (
            f"{where}: {self.problem}; expected {self.expected}"
            if where
            else f"{self.problem}; expected {self.expected}"
        )


Ran = dict[tuple[int, int], list[tuple[Kind, int, int]]]  # (stage, microbatch) -> (kind, rank, position)


def verify(schedule: Schedule) -> list[Violation]:
    """Every violation of `schedule`; an empty list proves that it is sound:

    - every action is on the rank that holds its stage, within the stages and microbatches there are;
    - every (stage, microbatch) runs forward once, and backward once, whole or in two halves (or the schedule
      has forwards alone);
    - no rank waits for ever: the order has no cycle.
    """
    ran: Ran = {}
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            for action in actions_of(entry):
                ran.setdefault((action.stage, action.microbatch), []).append((action.kind, rank, position))
    violations = [*_foreign(schedule, ran), *_misplaced(schedule, ran), *_not_once(schedule, ran)]
    return violations or list(_deadlock(schedule))


def _foreign(schedule: Schedule, ran: Ran) -> Iterator[Violation]:
    stages, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    for stage, microbatch in ran:
        if stage < stages and microbatch < microbatches:
            continue
        among = f"stages 0..{stages - 1} and microbatches 0..{microbatches - 1}"
        for kind, rank, position in ran[stage, microbatch]:
            yield Violation(f"{Action(kind, stage, microbatch)} does not exist", among, rank, position)


def _misplaced(schedule: Schedule, ran: Ran) -> Iterator[Violation]:
    stages, paths = schedule.placement.num_stages, schedule.placement.paths
    for (stage, microbatch), runs in ran.items():
        if stage >= stages:
            continue
        holder = paths[microbatch % len(paths)][stage]
        for kind, rank, position in runs:
            if rank != holder:
                wants = f"it on rank {holder}, which holds its stage"
                yield Violation(f"{Action(kind, stage, microbatch)} is on rank {rank}", wants, rank, position)


def _not_once(schedule: Schedule, ran: Ran) -> Iterator[Violation]:
    whole: tuple[list[Kind], ...] = ([Kind.B, Kind.F], [Kind.F, Kind.I, Kind.W])
    if schedule.is_forward_only:
        whole = ([Kind.F],)
    for stage in range(schedule.placement.num_stages):
        for microbatch in range(schedule.num_microbatches):
            runs = ran.get((stage, microbatch), [])
            kinds = sorted([kind for kind, _, _ in runs])
            if kinds in whole:
                continue
            seen: set[Kind] = set()
            for kind, rank, position in runs:
                if kind in seen:
                    yield Violation(
                        f"{Action(kind, stage, microbatch)} runs again", "every action once", rank, position
                    )
                seen.add(kind)
            if sorted(seen) not in whole:
                has = ", ".join(str(Action(kind, stage, microbatch)) for kind in sorted(seen)) or "nothing"
                wants = "its forward alone" if schedule.is_forward_only else "F and B, or F, I and W"
                holder = schedule.placement.rank_of(stage, microbatch)
                yield Violation(f"of stage {stage}, microbatch {microbatch} runs {has}", wants, holder)


def _deadlock(schedule: Schedule) -> Iterator[Violation]:
    order = Order(schedule)
    for _ in order:
        pass
    if order.stuck:
        yield _cycle(schedule)


def _cycle(schedule: Schedule) -> Violation:
    import networkx

    graph = dependency_graph(schedule)
    cycle = [edge[0] for edge in networkx.find_cycle(graph)]
    first = graph.nodes[cycle[0]]
    chain = " -> ".join(f"{action} (rank {graph.nodes[action]['rank']})" for action in (*cycle, cycle[0]))
    return Violation(
        f"deadlock: {chain}", "an order in which no action waits for itself", first["rank"], first["position"]
    )


def verify_programs(programs: Sequence[Program]) -> list[Violation]:
    """Every violation of the channel rule: between each ordered pair of ranks, the activations that one sends and
    those for which the other posts receives are the same, in the same order; and so for gradients.
    """
    sent: dict[Channel, list[Value]] = {}
    received: dict[Channel, list[Value]] = {}
    for program in programs:
        for instruction in program.instructions:
            match instruction:
                case Send(value, peer):
                    sent.setdefault((program.rank, peer, value.content), []).append(value)
                case Recv(value, peer):
                    received.setdefault((peer, program.rank, value.content), []).append(value)
                case _:
                    pass
    channels = sorted({*sent, *received})
    found = [_mismatch(channel, sent.get(channel, []), received.get(channel, [])) for channel in channels]
    return [violation for violation in found if violation is not None]


Channel = tuple[int, int, Content]  # from, to, of what


def _mismatch(channel: Channel, sent: list[Value], received: list[Value]) -> Violation | None:
    for index, (there, here) in enumerate(zip_longest(sent, received)):
        if there != here:
            ends = f"sent is {there or 'nothing'}, received is {here or 'nothing'}"
            problem = f"from rank {channel[0]} to rank {channel[1]}, transfer {index}: {ends}"
            return Violation(problem, "both ends to list the same values in the same order")
    return None
