from __future__ import annotations

import random
from dataclasses import replace
from math import isclose

import pytest

from pipeflow.core.action import Kind
from pipeflow.core.analysis.idle_time import causes
from pipeflow.core.analysis.order import dependency_graph
from pipeflow.core.analysis.simulation import simulate, simulate_shared
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Stream
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.families import make_near


def random_cost(stages: int, seed: int) -> CostModel:
    draw = random.Random(seed)
    forward, backward_input, backward_weight = (tuple(draw.uniform(0.5, 2) for _ in range(stages)) for _ in range(3))
    sizes, reduce = (tuple(draw.uniform(0, 1) for _ in range(stages)) for _ in range(2))
    passes = (forward, backward_input, backward_weight)
    return CostModel(*passes, latency=0.1, bandwidth=2, activation_bytes=sizes, reduce=reduce)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_every_action_starts_as_early_as_the_graph_allows(name: str, seed: int) -> None:
    """The longest path through the dependency graph, with networkx's order and nothing else in common. Links are free
    of bytes here, since what queues on them is no edge of the graph.
    """
    networkx = pytest.importorskip("networkx")
    schedule = make_near(name, ranks=3, microbatches=5).without_pairs()
    if (
        len(schedule.placement.paths) == 1
    ):  # else reductions wait for other ranks, which a graph of one order cannot say
        schedule = schedule.with_reductions()
    factors = tuple(map(random.Random(seed).uniform, [0.1] * 5, [3] * 5)) if seed else ()  # else all are alike
    cost = replace(random_cost(schedule.placement.num_stages, seed), activation_bytes=(), microbatch_factors=factors)
    graph = dependency_graph(schedule)
    ends: dict[object, float] = {}
    for action in networkx.topological_sort(graph):
        start = 0.0
        for before in graph.predecessors(action):
            crosses = graph.nodes[before]["rank"] != graph.nodes[action]["rank"]
            edge = before.stage if action.kind is Kind.F else action.stage
            start = max(start, ends[before] + (cost.transfer(edge) if crosses else 0.0))
        ends[action] = start + cost.duration(action.kind, action.stage, action.microbatch)
    timeline = simulate(schedule, cost)
    spans = timeline
    assert {span.action: span.end for span in spans} == pytest.approx(ends)


def test_two_ranks_with_a_transfer() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0")
    timeline = simulate(schedule, CostModel.even(schedule.placement, 1, 2, 3, transfer=0.5))
    assert [(span.start, span.end) for span in timeline] == [(0, 1), (8, 13), (1.5, 2.5), (2.5, 7.5)]


def test_values_leave_a_link_one_after_the_other_and_travel_at_once() -> None:
    """F takes 1, a value 3 on the link and then 10 on its way; what goes back is on a link of its own.

    Sent at 1, 2 and 3, the activations have left at 4, 7 and 10 and arrive at 14, 17 and 20. The gradients are made at
    23, 25 and 27, have left at 26, 29 and 32 and arrive at 36, 39 and 42.
    """
    schedule = Schedule.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2")
    cost = CostModel((1, 1), (1, 1), (0, 1), latency=10, bandwidth=2, activation_bytes=(6, 100))
    first, last = simulate(schedule, cost).rows
    assert [span.start for span in last] == [14, 17, 20, 21, 23, 25]
    assert [span.start for span in first] == [0, 1, 2, 36, 39, 42]


def test_each_ordered_pair_of_ranks_has_a_link_of_its_own() -> None:
    """What goes from rank 0 to 1 (4 each) does not wait for what goes from 1 to 2 (5 each), nor for what comes back."""
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1")
    cost = CostModel((1,) * 3, (1,) * 3, (1,) * 3, bandwidth=1, activation_bytes=(4, 5, 0))
    starts = [[span.start for span in row] for row in simulate(schedule, cost).rows]
    assert starts == [[0, 1, 30, 35], [5, 9, 24, 29], [11, 16, 17, 19]]


def test_what_passes_on_a_route_takes_its_link_and_is_waited_for() -> None:
    """From rank 0 to 2, 7 each; what goes to the neighbours is free. 2F0 has it at 1 + 7, 2F1 at 8 + 7; back, 2B0 ends
    at 11, 2B1 at 18: at 18 and 25 stage 0 has what it needs.
    """
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1")
    cost = CostModel((1,) * 3, (1,) * 3, (1,) * 3, bandwidth=1, route_bytes={(0, 2): 7})
    starts = [[span.start for span in row] for row in simulate(schedule, cost).rows]
    assert starts == [[0, 1, 18, 25], [1, 2, 11, 18], [8, 9, 15, 16]]
    vee = Schedule.from_csv("0F0,2F0,2B0,0B0\n1F0,1B0", Placement(((0, 1, 0),)))  # on one rank nothing travels
    assert simulate(vee, cost) == simulate(vee, replace(cost, route_bytes={}))


def test_a_neighbour_sees_the_input_gradient_before_the_weight_gradient() -> None:
    whole, halves = (
        Schedule.from_csv(f"0F0,{last}\n1F0,{first}") for first, last in [("1B0", "0B0"), ("1I0,1W0", "0I0,0W0")]
    )
    assert simulate(whole).makespan == 6
    assert simulate(halves).makespan == 5


def test_without_costs_every_pass_takes_1_and_transfers_nothing() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    assert simulate(schedule) == simulate(schedule, CostModel.even(schedule.placement))


def test_the_rows_of_a_timeline_are_those_of_the_schedule() -> None:
    schedule = Schedule.from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2", Placement.linear(1))
    assert [str(span.action) for span in simulate(schedule)] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]


@pytest.mark.parametrize(
    ("name", "makespans"),
    [("interleaved-1f1b", (133, 164, 213)), ("zb-v", (125, 155, 206)), ("dualpipe-v", (110.5, 122, 161.5))],
)
def test_pairs_hide_the_exchange_of_experts(name: str, makespans: tuple[float, ...]) -> None:
    """8 ranks and 32 microbatches, with F = 1 and B = 2 of computations, and exchanges that are a share of all."""
    options = {"chunks": 2} if name == "interleaved-1f1b" else {}
    schedule = make_schedule(name, ranks=8, microbatches=32, **options)
    for share, makespan in zip((0.20, 0.35, 0.50), makespans, strict=True):
        times = 1 / (1 - share), 2 / (1 - share) - 1, 1
        cost = CostModel.even(schedule.placement, *times, exchange=share)
        assert simulate(schedule, cost).makespan == pytest.approx(makespan, abs=0.3)
        apart, usual = (
            [(span.action, span.start, span.end) for span in simulate(schedule.without_pairs(), each)]
            for each in (cost, CostModel.even(schedule.placement, *times))
        )
        assert apart == usual
        assert simulate_shared(schedule, cost, 16).makespan == pytest.approx(simulate(schedule, cost).makespan)


@pytest.mark.parametrize("stages", [1, 3])
def test_costs_of_another_number_of_stages_are_an_error(stages: int) -> None:
    with pytest.raises(
        UsageError, match=f"the cost model has {stages} stages, schedule '1f1b' has 2: give one cost per"
    ):
        simulate(make_schedule("1f1b", ranks=2, microbatches=2), CostModel.even(Placement.linear(stages)))


def test_the_graph_names_places_and_reasons() -> None:
    graph = dependency_graph(Schedule.from_csv("0F0,0B0\n1F0,1B0"))
    edges = {(str(before), str(after)): data["reason"] for before, after, data in graph.edges(data=True)}
    assert edges == {
        ("0F0", "0B0"): "saved of stage 0, microbatch 0",
        ("1F0", "1B0"): "saved of stage 1, microbatch 0",
        ("0F0", "1F0"): "activation of stage 0, microbatch 0",
        ("1B0", "0B0"): "gradient of stage 1, microbatch 0",
    }
    assert {str(action): (data["rank"], data["position"]) for action, data in graph.nodes(data=True)} == {
        "0F0": (0, 0), "0B0": (0, 1), "1F0": (1, 0), "1B0": (1, 1),
    }  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("reduce", [0.0, 0.5, 2.0, 40.0])
def test_reductions_change_nothing_but_when_the_step_ends(name: str, reduce: float) -> None:
    """And that by no more than a rank and those that share its stages have to reduce; what remains is on the path."""
    schedule = make_schedule(name, ranks=4, microbatches=6)
    cost = CostModel.even(schedule.placement, transfer=0.25, reduce=reduce)
    plain, reduced = simulate(schedule, cost), simulate(schedule.with_reductions(), cost)
    assert reduced.on(Stream.COMPUTE) == plain.rows
    assert (reduced.work, reduced.peak_activations) == (plain.work, plain.peak_activations)
    whole = reduce * len(schedule.placement.paths)
    assert plain.makespan <= reduced.makespan <= plain.makespan + whole + 1e-9
    assert plain.span <= reduced.span <= plain.span + whole + 1e-9
    assert isclose(reduced.exposed, reduced.makespan - plain.makespan, abs_tol=1e-9)
    ends = [row[-1].end for row in reduced.on(Stream.REDUCE)]
    assert reduced.makespan == max(plain.makespan, *ends)
    for rank, row in enumerate(reduced.on(Stream.REDUCE)):
        assert {span.action.stage for span in row} == {*schedule.placement.stages_of(rank)}
        assert row[-1].end >= plain.rows[rank][-1].end  # the last one begins when its rank is done


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_with_one_stage_a_rank_nothing_hides_a_reduction(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    cost = CostModel.even(schedule.placement, reduce=3)
    assert simulate(schedule.with_reductions(), cost).makespan == simulate(schedule, cost).makespan + 3


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_hides_the_reductions_of_all_chunks_but_the_first(chunks: int) -> None:
    """While those are shorter than the last group's backwards of the chunk below."""
    schedule = make_schedule("interleaved-1f1b", ranks=4, microbatches=8, chunks=chunks)
    cost = CostModel.even(schedule.placement, reduce=4)
    timeline = simulate(schedule.with_reductions(), cost)
    assert timeline.exposed == 4 / chunks
    assert timeline.makespan == simulate(schedule, cost).makespan + 4 / chunks


def test_a_stage_of_two_ranks_is_reduced_by_both_at_once() -> None:
    schedule = Schedule.from_csv(
        "0F0,0B0,0REDUCE_GRAD,1F1,1B1,1REDUCE_GRAD\n1F0,1B0,0F1,1REDUCE_GRAD,0B1,0REDUCE_GRAD",
        Placement.bidirectional(2),
    )
    timeline = simulate(schedule, CostModel((3, 1), (1, 1), (1, 1), reduce=(2, 2)))
    first, second = [[(str(span.action), span.start, span.end) for span in row] for row in timeline.on(Stream.REDUCE)]
    # Rank 0 comes to 0R0 at 8 and to 1R1 at 12, rank 1 to 1R0 at 9 and to 0R1 at 14.
    assert first == [("1R1", 12, 14), ("0R0", 14, 16)]
    assert second == [("1R0", 12, 14), ("0R1", 14, 16)]
    assert [str(cause) for cause in causes(timeline)[0][-2:]] == [
        "1R1 on rank 0 came after 1B1",
        "0R0 on rank 0 waited for the weight gradient of stage 0, microbatch 1 from rank 1",
    ]
