"""Programs are verified by what is rejected: mutations of every schedule's, judged by running them without buffers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from pipeflow.core.action import Action, Kind, actions_of
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content, Value
from pipeflow.core.placement import Placement
from pipeflow.core.program import Compute, Instruction, Program, Recv, Release, Send
from pipeflow.core.route import Route, Routes, routes_among
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.transfers import verify_programs
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.covering import thinned

Steps = tuple[Instruction, ...]
Rows = tuple[Steps, ...]
Mutation = Callable[[Rows], Iterator[Rows]]

PAIRED = Schedule.from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,(1F2;1B1)OVERLAP_F_B,1B2", name="paired")
CROSSED = Schedule.from_csv("0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1", Placement.bidirectional(2), name="crossed")


class BrokenError(Exception):
    pass


class Oracle:
    """The definition, with no regard for speed: every rank goes on as far as it can; a send waits until its channel has
    a posted receive, and fills the first one."""

    def __init__(self, rows: Rows, routes: Routes = ()) -> None:
        self.rows = rows
        self.routes = routes
        computed = [action for row in rows for step in row if isinstance(step, Compute) for action in of(step)]
        self.stages = 1 + max((action.stage for action in computed), default=-1)
        self.trained = any(action.kind is not Kind.F for action in computed)
        self.reduced = any(action.kind is Kind.R for action in computed)
        self.at = [0] * len(rows)
        self.made: set[Value] = set()
        self.own: list[set[Value]] = [set() for _ in rows]  # made here, neither used nor sent
        self.posted: list[set[Value]] = [set() for _ in rows]  # and not used
        self.ever: list[set[Value]] = [set() for _ in rows]  # made here, or posted
        self.arrived: list[set[Value]] = [set() for _ in rows]
        self.sent: list[set[tuple[Value, int]]] = [set() for _ in rows]  # and not released
        self.channels: dict[tuple[int, int, Content], list[Value]] = {}

    def sound(self) -> bool:
        try:
            while sum(self.go_on(rank) for rank in range(len(self.rows))):
                pass
        except BrokenError:
            return False
        ended = all(at == len(row) for at, row in zip(self.at, self.rows, strict=True))
        own = [{value for value in own if value.content is not Content.WEIGHT_GRADIENT} for own in self.own]
        return ended and not any((*own, *self.posted, *self.sent, *self.channels.values()))

    def go_on(self, rank: int) -> int:
        """How many more instructions the rank could run."""
        start = self.at[rank]
        while self.at[rank] < len(self.rows[rank]) and self.run(rank, self.rows[rank][self.at[rank]]):
            self.at[rank] += 1
        return self.at[rank] - start

    def run(self, rank: int, step: Instruction) -> bool:
        match step:
            case Recv(value, peer):
                require(value not in self.ever[rank])
                self.ever[rank].add(value)
                self.posted[rank].add(value)
                self.channels.setdefault((peer, rank, value.content), []).append(value)
            case Send(value, peer):
                require(value in self.own[rank])
                posted = self.channels.get((rank, peer, value.content), [])
                if not posted:
                    return False
                require(posted.pop(0) == value)
                self.own[rank].remove(value)
                self.arrived[peer].add(value)
                self.sent[rank].add((value, peer))
            case Release(value, peer):
                require((value, peer) in self.sent[rank])
                self.sent[rank].remove((value, peer))
            case Compute():
                return self.compute(rank, of(step))
        return True

    def compute(self, rank: int, actions: tuple[Action, ...]) -> bool:
        wanted = [value for action in actions for value in self.needs(action)]
        require(all(value in self.own[rank] | self.posted[rank] for value in wanted))
        if not all(value in self.own[rank] | self.arrived[rank] for value in wanted):
            return False
        for value in wanted:
            (self.own if value in self.own[rank] else self.posted)[rank].remove(value)
        for value in (value for action in actions for value in self.makes(action)):
            require(value not in self.made and value not in self.ever[rank])
            self.made.add(value)
            self.ever[rank].add(value)
            self.own[rank].add(value)
        return True

    def needs(self, action: Action) -> list[Value]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.W:
            return [Value(Content.DEFERRED, stage, microbatch)]
        if action.kind is Kind.R:
            return [Value(Content.WEIGHT_GRADIENT, stage, microbatch)]
        if action.kind is Kind.F:
            from_far = [Value(Content.ACTIVATION, one, microbatch, to) for one, to in self.routes if to == stage]
            return [*from_far, Value(Content.ACTIVATION, stage - 1, microbatch)] if stage else []
        later = [Value(Content.GRADIENT, stage + 1, microbatch)] if stage + 1 < self.stages else []
        later += [Value(Content.GRADIENT, to, microbatch, one) for one, to in self.routes if one == stage]
        return [*later, Value(Content.SAVED, stage, microbatch)]

    def makes(self, action: Action) -> list[Value]:
        stage, microbatch = action.stage, action.microbatch
        contents: list[Content] = []
        far: list[Value] = []
        if action.kind is Kind.F:
            contents += [Content.ACTIVATION] * (stage + 1 < self.stages) + [Content.SAVED] * self.trained
            far = [Value(Content.ACTIVATION, stage, microbatch, to) for one, to in self.routes if one == stage]
        elif action.kind in (Kind.B, Kind.I):
            contents += [Content.GRADIENT] * (stage > 0) + [Content.DEFERRED] * (action.kind is Kind.I)
            far = [Value(Content.GRADIENT, stage, microbatch, one) for one, to in self.routes if to == stage]
        if action.kind in (Kind.B, Kind.W):
            contents += [Content.WEIGHT_GRADIENT] * self.reduced
        return [*far, *(Value(content, stage, microbatch) for content in contents)]


def of(step: Compute) -> tuple[Action, ...]:
    return actions_of(step.entry)


def require(fine: bool) -> None:
    if not fine:
        raise BrokenError


def changed(rows: Rows, rank: int, steps: Steps) -> Rows:
    return (*rows[:rank], steps, *rows[rank + 1 :])


def places(rows: Rows) -> Iterator[tuple[int, int, Instruction]]:
    for rank, row in enumerate(rows):
        for position, step in enumerate(row):
            yield rank, position, step


def dropped(rows: Rows) -> Iterator[Rows]:
    for rank, position, _ in places(rows):
        yield changed(rows, rank, rows[rank][:position] + rows[rank][position + 1 :])


def duplicated(rows: Rows) -> Iterator[Rows]:
    for rank, position, step in places(rows):
        yield changed(rows, rank, (*rows[rank][:position], step, *rows[rank][position:]))
        yield changed(rows, rank, (*rows[rank], step))


def swapped(rows: Rows) -> Iterator[Rows]:
    for rank, row in enumerate(rows):
        for first, second in combinations(range(len(row)), 2):
            order = list(row)
            order[first], order[second] = order[second], order[first]
            yield changed(rows, rank, tuple(order))


def moved(rows: Rows) -> Iterator[Rows]:
    """To another place of the same program, and to another rank's."""
    for rank, position, step in places(rows):
        without = changed(rows, rank, rows[rank][:position] + rows[rank][position + 1 :])
        for target, to in ((rank, position // 2), (rank, position + 3), ((rank + 1) % len(rows), position)):
            yield changed(without, target, (*without[target][:to], step, *without[target][to:]))


def retargeted(rows: Rows) -> Iterator[Rows]:
    for rank, position, step in places(rows):
        if not isinstance(step, Compute):
            for peer in {*range(len(rows) + 1)} - {step.peer}:
                yield changed(
                    rows, rank, (*rows[rank][:position], replace(step, peer=peer), *rows[rank][position + 1 :])
                )


def revalued(rows: Rows) -> Iterator[Rows]:
    """Another content, stage, or microbatch, also ones that do not exist."""
    for rank, position, step in places(rows):
        if not isinstance(step, Compute):
            value = step.value
            others = [value._replace(content=content) for content in Content]
            others += [value._replace(stage=stage) for stage in (value.stage + 1, 9)]
            others += [value._replace(to=to) for to in (None, 0, 2, 3)]
            others += [value._replace(microbatch=microbatch) for microbatch in (value.microbatch + 1, 9)]
            for other in others:
                if other != value:
                    mutant = replace(step, value=other)
                    yield changed(rows, rank, (*rows[rank][:position], mutant, *rows[rank][position + 1 :]))


def programs_of(rows: Rows) -> list[Program]:
    return [Program(rank, steps, 0) for rank, steps in enumerate(rows)]


ROUTED = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1I1,1W1\n2F0,2B0,2F1,2B1", name="routed")
ROUTES = {
    ROUTED: (Route(0, 2),),
    make_schedule("zb-v", ranks=2, microbatches=2): (Route(0, 2), Route(0, 3), Route(1, 3)),
    make_schedule("gpipe", ranks=4, microbatches=3): (Route(0, 2), Route(0, 3), Route(1, 3)),
    make_schedule("chimera", ranks=4, microbatches=4): (Route(0, 3), Route(1, 3)),
    make_schedule("interleaved-1f1b", ranks=2, microbatches=3).forward_only(): (Route(0, 3),),
}


FORMS: dict[str, Callable[[str], Schedule]] = {
    "2 ranks": lambda name: make_schedule(name, ranks=2, microbatches=3),
    "4 ranks": lambda name: make_schedule(name, ranks=4, microbatches=2),
    "reductions": lambda name: make_schedule(name, ranks=2, microbatches=3).with_reductions(),
}
MORE = [
    make_schedule("interleaved-1f1b", ranks=2, microbatches=2).forward_only(),
    *(PAIRED, CROSSED),
    *(schedule.with_reductions() for schedule in (PAIRED, CROSSED)),
    *ROUTES,
]
MUTATIONS: list[Mutation] = [dropped, duplicated, swapped, moved, retargeted, revalued]


@pytest.mark.some(38)
@pytest.mark.parametrize(("name", "form", "mutate"), thinned(tuple(SCHEDULES), tuple(FORMS), MUTATIONS))
@pytest.mark.slow
def test_programs_are_verified_as_they_run(name: str, form: str, mutate: Mutation) -> None:
    require_agreement(FORMS[form](name), mutate)


@pytest.mark.some(20)
@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("schedule", MORE, ids=lambda schedule: f"{schedule.name} {len(schedule.rows)}")
@pytest.mark.slow
def test_programs_by_hand_and_with_routes_are_verified_as_they_run(schedule: Schedule, mutate: Mutation) -> None:
    require_agreement(schedule, mutate)


def require_agreement(schedule: Schedule, mutate: Mutation) -> None:
    """Over all mutants of those by hand, and at most 100 of every kind of the others."""
    routes = ROUTES.get(schedule, ())
    rows = tuple(program.instructions for program in lower(schedule, routes=routes))
    assert Oracle(rows, routes).sound()
    assert verify_programs(programs_of(rows), routes) == []
    mutants = list(mutate(rows))
    if schedule not in (PAIRED, CROSSED, ROUTED):
        mutants = random.Random(0).sample(mutants, min(100, len(mutants)))
    refused = 0
    for mutant in mutants:
        violations = verify_programs(programs_of(mutant), routes)
        assert (violations == []) == Oracle(mutant, routes).sound(), "\n".join(map(str, mutant))
        assert len(set(violations)) == len(violations), "one violation is listed twice"
        refused += bool(violations)
    assert refused


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_programs_need_no_buffers_whatever_they_were_priced_at(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    schedule = make_schedule(name, ranks=2 * draw.randint(1, 3), microbatches=draw.randint(1, 9))
    stages = range(schedule.placement.num_stages)
    forward, input_half, weight_half = (tuple(draw.choice([0.0, 0.1, 1.0, 5.0]) for _ in stages) for _ in range(3))
    programs = lower(schedule, CostModel(forward, input_half, weight_half, latency=draw.choice([0.0, 1.0, 20.0])))
    assert verify_programs(programs) == []
    assert Oracle(tuple(program.instructions for program in programs)).sound()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_programs_with_routes_need_no_buffers_whatever_they_were_priced_at(name: str, seed: int) -> None:
    """Also where what passes on a route takes its link for longer than anything else takes, or is not priced."""
    draw = random.Random(f"routes {name} {seed}")
    schedule = make_schedule(name, ranks=2 * draw.randint(1, 3), microbatches=draw.randint(1, 6))
    stages = schedule.placement.num_stages
    pairs = [pair for pair in combinations(range(stages), 2) if pair[1] > pair[0] + 1]
    routes = routes_among(stages, draw.sample(pairs, draw.randint(0, len(pairs))))
    forward, input_half, weight_half, near = (
        tuple(draw.choice([0.0, 0.1, 1.0, 5.0]) for _ in range(stages)) for _ in range(4)
    )
    priced = [route for route in routes if draw.random() < 0.8]
    far: dict[tuple[int, int], float] = {route: draw.choice([0.0, 1.0, 30.0]) for route in priced}
    latency = draw.choice([0.0, 1.0])
    cost = CostModel(
        forward, input_half, weight_half, latency=latency, bandwidth=1, activation_bytes=near, route_bytes=far
    )
    programs = lower(schedule, cost, routes)
    assert verify_programs(programs, routes) == []
    assert Oracle(tuple(program.instructions for program in programs), routes).sound()


def two_ranks(first: str, second: str) -> list[Program]:
    """From cells like 0F0 and `s a0.0`: send, receive (r) or release (x) an activation or gradient of the other."""
    kinds: dict[str, type[Send | Recv | Release]] = {"s": Send, "r": Recv, "x": Release}
    contents = {"a": Content.ACTIVATION, "g": Content.GRADIENT}

    def step(cell: str, rank: int) -> Instruction:
        kind, _, value = cell.partition(" ")
        if not value:
            return Compute(Action.parse(cell))
        stage, microbatch = value[1:].split(".")
        return kinds[kind](Value(contents[value[0]], int(stage), int(microbatch)), 1 - rank)

    rows = (first, second)
    return [Program(rank, tuple(step(cell, rank) for cell in row.split(", ")), 0) for rank, row in enumerate(rows)]


def test_a_send_that_needs_a_buffer_is_a_deadlock() -> None:
    """Both ranks send before they post; each would go on if a send did not wait."""
    programs = two_ranks(
        "0F0, s a0.0, r a0.1, 1F1, x a0.0",
        "0F1, s a0.1, r a0.0, 1F0, x a0.1",
    )
    (violation,) = verify_programs(programs)
    assert str(violation) == (
        "rank 0, position 1: deadlock: send of the activation of stage 0, microbatch 0 (rank 0) -> "
        "receive of the activation of stage 0, microbatch 1 (rank 0) -> "
        "send of the activation of stage 0, microbatch 1 (rank 1) -> "
        "receive of the activation of stage 0, microbatch 0 (rank 1) -> "
        "send of the activation of stage 0, microbatch 0 (rank 0); "
        "expected an order that needs no buffers: here a send waits until its receive is posted"
    )


def test_a_wait_for_what_is_not_sent_is_a_deadlock_with_buffers_too() -> None:
    programs = two_ranks(
        "r g1.0, 0F0, 0B0, s a0.0, x a0.0",
        "r a0.0, 1F0, 1B0, s g1.0, x g1.0",
    )
    (violation,) = verify_programs(programs)
    assert violation.problem == (
        "deadlock: 0B0 (rank 0) -> send of the activation of stage 0, microbatch 0 (rank 0) -> 1F0 (rank 1) -> "
        "send of the gradient of stage 1, microbatch 0 (rank 1) -> 0B0 (rank 0)"
    )
    assert violation.expected == "an order in which no instruction waits for itself"


@pytest.mark.parametrize(
    ("first", "second", "messages"),
    [
        ("0F0, s a0.0, x a0.0", "1F0, r a0.0", [
            "rank 1, position 0: 1F0 needs the activation of stage 0, microbatch 0, neither made nor received before; "
            "expected every value there for its use",
            "rank 1, position 1: the activation of stage 0, microbatch 0 is never used; "
            "expected a later use or send of it",
        ]),
        ("s a0.0, 0F0, x a0.0", "r a0.0, r a0.0, 1F0", [
            "rank 0, position 0: send of the activation of stage 0, microbatch 0 to rank 1, not made before; "
            "expected every value there for its send",
            "rank 0, position 2: release of the activation of stage 0, microbatch 0; "
            "expected a send of it to rank 1 that is not released yet",
            "rank 0, position 1: the activation of stage 0, microbatch 0 is never used; "
            "expected a later use or send of it",
            "rank 1, position 1: receive of the activation of stage 0, microbatch 0 from rank 0, already there; "
            "expected every value once",
            "rank 1, position 1: activation 1: rank 0 sends nothing, rank 1 receives the activation of stage 0, "
            "microbatch 0; expected the same values in the same order at both ends",
        ]),
        ("0F0, s a0.0, s a0.0, 0F0, x a0.0", "r a0.0, 1F0", [
            "rank 0, position 2: send of the activation of stage 0, microbatch 0 to rank 1, already used or sent; "
            "expected every value there for its send",
            "rank 0, position 3: 0F0 makes the activation of stage 0, microbatch 0 again; "
            "expected every value made once",
            "rank 0, position 2: activation 1: rank 0 sends the activation of stage 0, microbatch 0, rank 1 receives "
            "nothing; expected the same values in the same order at both ends",
        ]),
        ("0F0, 0F1, s a0.0, s a0.1, x a0.0", "r a0.1, r a0.0, 1F0, 1F1", [
            "rank 0, position 3: send of the activation of stage 0, microbatch 1 to rank 1; "
            "expected a later release of it",
            "rank 1, position 0: activation 0: rank 0 sends the activation of stage 0, microbatch 0, rank 1 receives "
            "the activation of stage 0, microbatch 1; expected the same values in the same order at both ends",
        ]),
    ],
)  # fmt: skip
def test_all_that_is_wrong_is_listed_with_its_place(first: str, second: str, messages: list[str]) -> None:
    assert [str(violation) for violation in verify_programs(two_ranks(first, second))] == messages
