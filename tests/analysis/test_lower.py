from __future__ import annotations

import random
from itertools import combinations, permutations

import pytest

from pipeflow.core.action import Kind, actions_of
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content, Value
from pipeflow.core.program import Compute, Instruction, Program, Recv, Release, Send
from pipeflow.core.route import routes_among
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.transfers import verify_programs
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.families import make_near


def text(step: Instruction) -> str:
    if isinstance(step, Compute):
        return str(step.entry)
    letter = "a" if step.value.content is Content.ACTIVATION else "g"
    return f"{type(step).__name__.lower()} {letter}{step.value.stage}.{step.value.microbatch}"


def test_the_programs_of_two_ranks() -> None:
    first, last = lower(Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"))
    assert [text(step) for step in first.instructions] == [
        "0F0", "send a0.0", "recv g1.0", "0F1", "send a0.1", "recv g1.1", "0B0", "release a0.0", "0B1", "release a0.1",
    ]  # fmt: skip
    assert [text(step) for step in last.instructions] == [
        "recv a0.0", "recv a0.1", "1F0", "1B0", "send g1.0", "1F1", "1B1", "send g1.1", "release g1.0", "release g1.1",
    ]  # fmt: skip


def test_over_a_slow_link_receives_are_posted_earlier_by_its_latency() -> None:
    """F takes 1 and the link 3. Activation k is sent at k + 1, so its post must leave at k - 2, when rank 1 runs its
    forward k - 7, which began at k - 3: it is posted before the forward k - 8.
    """
    schedule = make_schedule("gpipe", ranks=2, microbatches=12)
    _, last = lower(schedule, CostModel.even(schedule.placement, transfer=3))
    before, positions = 0, []
    for step in last.instructions:
        before += isinstance(step, Compute)
        if isinstance(step, Recv):
            positions.append(before)
    assert positions == [0] * 9 + [1, 2, 3]
    assert last.receive_buffers == brute_force_buffers(last)


def passed(program: Program, peer: int, kind: type[Send | Recv]) -> list[Value]:
    """The values that a rank sends to a peer, or receives from it, in order."""
    return [step.value for step in program.instructions if isinstance(step, kind) and step.peer == peer]


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "v-half", "interleaved-zb", "gis", "gis-h", "dualpipe"])
def test_values_between_two_ranks_have_one_order_at_both_ends_whatever_they_cost(name: str) -> None:
    """Activations and gradients together: they share a communicator."""
    random_costs = random.Random(1)
    schedule = make_near(name, ranks=4, microbatches=8)
    for _ in range(20):
        stages, latency = range(schedule.placement.num_stages), random_costs.choice((0, 1, 3, 10))
        forward, inputs, weights = (tuple(random_costs.choice((1, 2, 5, 9)) for _ in stages) for _ in range(3))
        programs = lower(schedule, CostModel(forward, inputs, weights, latency=latency))
        for source, destination in permutations(programs, 2):
            assert passed(source, destination.rank, Send) == passed(destination, source.rank, Recv)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("latency", [1, 7])
def test_programs_for_slow_links_are_sound(name: str, latency: float) -> None:
    schedule = make_near(name, ranks=4, microbatches=8).without_pairs()
    programs = lower(schedule, CostModel.even(schedule.placement, transfer=latency))
    assert verify_programs(programs) == []
    for program in programs:
        assert program.receive_buffers == brute_force_buffers(program)


def test_one_rank_sends_nothing_not_even_between_its_chunks() -> None:
    (program,) = lower(make_schedule("interleaved-1f1b", ranks=1, microbatches=3, chunks=2))
    assert all(isinstance(step, Compute) for step in program.instructions)
    assert program.receive_buffers == 0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", [0, 2])
def test_a_receive_is_posted_before_what_runs_when_its_sender_must_know(name: str, transfer: float) -> None:
    """That is a latency before the value is sent, or at the start."""
    schedule = make_schedule(name, ranks=4, microbatches=8)
    cost = CostModel.even(schedule.placement, transfer=transfer)
    spans = {span.action: span for span in simulate(schedule, cost)}
    programs = lower(schedule, cost)
    sent = {}
    for program in programs:
        now = 0.0
        for step in program.instructions:
            match step:
                case Compute(entry):
                    now = spans[actions_of(entry)[-1]].end
                case Send(value, _):
                    sent[value] = now
                case _:
                    pass
    for program in programs:
        posted = 0.0  # when the entry before began: at the latest then a receive here must be posted
        for step in program.instructions:
            match step:
                case Compute(entry):
                    posted = spans[actions_of(entry)[0]].start
                case Recv(value, _):
                    assert posted <= max(0.0, sent[value] - transfer)
                case _:
                    pass


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_reduction_follows_the_sends_after_its_last_weight_gradient(name: str) -> None:
    """And nothing else of the programs is changed."""
    schedule = make_schedule(name, ranks=4, microbatches=6)
    for plain, reducing in zip(lower(schedule), lower(schedule.with_reductions()), strict=True):
        steps = list(reducing.instructions)
        found = [step for step in steps if isinstance(step, Compute) and actions_of(step.entry)[0].kind is Kind.R]
        assert {actions_of(step.entry)[0].stage for step in found} == {*schedule.placement.stages_of(plain.rank)}
        for step in found:
            before = steps[: steps.index(step)]
            while isinstance(before[-1], Send):
                before.pop()
            assert isinstance(before[-1], Compute)
            reduction, last = actions_of(step.entry)[0], actions_of(before[-1].entry)[-1]
            assert (last.stage, last.microbatch) == (reduction.stage, reduction.microbatch)
            assert last.kind in (Kind.B, Kind.W)
        assert tuple(step for step in steps if step not in found) == plain.instructions
        assert reducing.receive_buffers == plain.receive_buffers


@pytest.mark.some(13)
@pytest.mark.parametrize("latency", [0, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_passes_on_routes_is_sent_once_and_between_ranks_alone(name: str, latency: float) -> None:
    schedule = make_near(name, ranks=4, microbatches=6).without_pairs()
    stages = schedule.placement.num_stages
    pairs = [pair for pair in combinations(range(stages), 2) if pair[1] > pair[0] + 1]
    for number in (1, len(pairs) // 2, len(pairs)):
        routes = routes_among(stages, random.Random(f"{name} {number}").sample(pairs, number))
        priced = CostModel.even(schedule.placement, transfer=latency)
        programs = lower(schedule, priced, routes)
        assert verify_programs(programs, routes) == []
        sent = sorted(
            (step.value.content, program.rank, step.peer, step.value.stage, step.value.to, step.value.microbatch)
            for program in programs
            for step in program.instructions
            if isinstance(step, Send) and step.value.to is not None
        )
        expected = []
        for source, target in routes:
            for microbatch in range(6):
                here, there = (schedule.placement.rank_of(stage, microbatch) for stage in (source, target))
                if here != there:
                    expected.append((Content.ACTIVATION, here, there, source, target, microbatch))
                    expected.append((Content.GRADIENT, there, here, target, source, microbatch))
        assert sent == sorted(expected)
        assert all(program.receive_buffers == brute_force_buffers(program) for program in programs)
        assert bool(verify_programs(programs)) == bool(sent)  # what no route says is refused
        evaluated = lower(schedule.forward_only(), priced, routes)
        assert verify_programs(evaluated, routes) == []


def brute_force_buffers(program: Program) -> int:
    """Received values that are alive at once, looked up for every instruction."""
    steps = program.instructions
    last = {}
    for index, step in enumerate(steps):
        if isinstance(step, Compute):
            last.update({(action.stage, action.microbatch): index for action in actions_of(step.entry)})
    lives = []
    for index, step in enumerate(steps):
        if isinstance(step, Recv):
            stage = step.value.stage + (1 if step.value.content is Content.ACTIVATION else -1)
            stage = stage if step.value.to is None else step.value.to
            lives.append((index, last[stage, step.value.microbatch]))
    return max((sum(start <= index <= end for start, end in lives) for index in range(len(steps))), default=0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 1), (4, 8), (3, 7)])
def test_receive_buffers_are_counted(name: str, ranks: int, microbatches: int) -> None:
    for program in lower(make_near(name, ranks=ranks, microbatches=microbatches)):
        assert program.receive_buffers == brute_force_buffers(program)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_release_comes_with_proof_or_at_the_end(name: str) -> None:
    """Run the programs: when a rank lets go of a value, its peer has already used it, or the program ends."""
    schedule = make_near(name, ranks=3, microbatches=6)
    spans = {span.action: span for span in simulate(schedule)}
    users = {}
    for span in spans.values():
        if span.action.kind is not Kind.W:
            users[span.action.kind is Kind.F, span.action.stage, span.action.microbatch] = span
    for program in lower(schedule):
        last = max(index for index, step in enumerate(program.instructions) if isinstance(step, Compute))
        now = 0.0
        for index, step in enumerate(program.instructions):
            if isinstance(step, Compute):
                now = spans[actions_of(step.entry)[-1]].end
            if isinstance(step, Release) and index < last:
                forward = step.value.content is Content.ACTIVATION
                user = users[forward, step.value.stage + (1 if forward else -1), step.value.microbatch]
                assert user.end <= now
