from __future__ import annotations

import random

import pytest

from pipeflow.analysis.graph import dependency_graph
from pipeflow.analysis.simulate import simulate
from pipeflow.core.action import Kind
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.families import make_near


def random_cost(stages: int, seed: int) -> CostModel:
    draw = random.Random(seed)
    forward, backward_input, backward_weight = (tuple(draw.uniform(0.5, 2) for _ in range(stages)) for _ in range(3))
    sizes = tuple(draw.uniform(0, 1) for _ in range(stages))
    return CostModel(forward, backward_input, backward_weight, latency=0.1, bandwidth=2, activation_bytes=sizes)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_every_action_starts_as_early_as_the_graph_allows(name: str, seed: int) -> None:
    """The longest path through the dependency graph, with networkx's order and nothing else in common."""
    networkx = pytest.importorskip("networkx")
    schedule = make_near(name, ranks=3, microbatches=5).without_pairs()
    cost = random_cost(schedule.placement.num_stages, seed)
    graph = dependency_graph(schedule)
    ends: dict[object, float] = {}
    for action in networkx.topological_sort(graph):
        start = 0.0
        for before in graph.predecessors(action):
            crosses = graph.nodes[before]["rank"] != graph.nodes[action]["rank"]
            edge = before.stage if action.kind is Kind.F else action.stage
            start = max(start, ends[before] + (cost.transfer(edge) if crosses else 0.0))
        ends[action] = start + cost.duration(action.kind, action.stage)
    assert {span.action: span.end for span in simulate(schedule, cost)} == pytest.approx(ends)


def test_two_ranks_with_a_transfer() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0")
    timeline = simulate(schedule, CostModel.even(schedule.placement, 1, 2, 3, transfer=0.5))
    assert [(span.start, span.end) for span in timeline] == [(0, 1), (8, 13), (1.5, 2.5), (2.5, 7.5)]


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
