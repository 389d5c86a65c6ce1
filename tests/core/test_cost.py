from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.measured_step import measured_costs
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel, Link, read_costs
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Span, Timeline
from pipeflow.schedules import make_schedule


def test_costs_of_a_share_are_divided_among_its_chunks() -> None:
    cost = CostModel.even(Placement.looped(2, 4), forward=4, backward_input=8, backward_weight=2, transfer=3)
    assert [cost.duration(kind, 5) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)] == [1, 2.5, 2, 0.5]
    assert cost.transfer(0) == 3


def test_a_bidirectional_share_is_one_stage() -> None:
    assert CostModel.even(Placement.bidirectional(4)).duration(Kind.F, 0) == 1


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    cost = CostModel((1, 1), (1, 1), (1, 1), latency=2, bandwidth=10, activation_bytes=(30, 50))
    assert [cost.transfer(0), cost.transfer(1)] == [5, 7]


def test_a_link_of_its_own_differs_from_the_others() -> None:
    slow = {(0, 1): Link(latency=3, bandwidth=5)}
    cost = CostModel((1, 1), (1, 1), (1, 1), latency=2, bandwidth=10, activation_bytes=(30, 50), links=slow)
    assert [cost.transfer(0, 0, 1), cost.transfer(0, 1, 0)] == [9, 5]


def test_a_pair_hides_a_part_of_its_shorter_half() -> None:
    cost = CostModel((4, 4), (2, 2), (1, 1), overlap=0.5)
    assert [cost.pair(0, Kind.B, 1), cost.pair(0, Kind.I, 1)] == [5.5, 5]


@pytest.mark.parametrize(
    ("shares", "overlap", "times"),
    [
        ((0.25, 0.25), 0, [5.25, 4.25]),  # computations: 3 + 2.25, and 3 + 1.25; I has the whole exchange of B
        ((0.25, 0.25), 1, [4, 4]),  # the longer action alone
        ((0.75, 0.75), 0, [5.25, 5]),  # exchanges: 3 + 2.25, and 3 + 2
        ((1, 0), 0, [4, 4]),  # the forward computes nothing
        ((0, 0), 0, [7, 6]),
    ],
)
def test_a_pair_hides_exchanges_behind_computations(
    shares: tuple[float, ...], overlap: float, times: list[float]
) -> None:
    cost = CostModel((4, 4), (2, 2), (1, 1), overlap=overlap, exchange=shares)
    assert [cost.pair(0, Kind.B, 1), cost.pair(0, Kind.I, 1)] == times


@pytest.mark.parametrize(("overlap", "exposed"), [(0, 0.5), (1, 1)])
def test_what_is_left_of_exchanges(overlap: float, exposed: float) -> None:
    """Computations take 0.5 and 1, of which an overlap hides 0.5; the pair takes as long as its backward, 2."""
    cost = CostModel((1,), (1,), (1,), overlap=overlap, exchange=(0.5,))
    [_, forward, backward, _] = simulate(Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1"), cost)
    assert backward.end - forward.start == 2
    assert forward.exchange + backward.exchange == pytest.approx(exposed)


@pytest.mark.parametrize(
    "change",
    [
        {"forward": (1.0,)},
        {"exchange": (0.5,)},
        {"exchange": (0.5, 1.1)},
        {"exchange": (0.5, -0.1)},
        {"backward_input": ()},
        {"backward_weight": (1.0, 1.0, 1.0)},
        {"activation_bytes": (1.0,)},
        {"forward": (1.0, -1.0)},
        {"backward_input": (math.nan, 1.0)},
        {"backward_weight": (math.inf, 1.0)},
        {"activation_bytes": (1.0, -1.0)},
        {"latency": -1.0},
        {"latency": math.inf},
        {"bandwidth": 0.0},
        {"bandwidth": -1.0},
        {"bandwidth": math.nan},
        {"links": {(0, 1): Link(latency=-1.0)}},
        {"links": {(0, 1): Link(bandwidth=0.0)}},
        {"saved_bytes": (1.0,)},
        {"deferred_bytes": (1.0, -1.0)},
        {"reduce": (1.0,)},
        {"reduce": (1.0, -1.0)},
        {"overlap": -0.1},
        {"overlap": 1.1},
        {"route_bytes": {(0, 1): 1.0}},
    ],
    ids=str,
)
def test_impossible_costs_are_refused(change: dict[str, Any]) -> None:
    sound: dict[str, Any] = {"forward": (1.0, 1.0), "backward_input": (1.0, 1.0), "backward_weight": (1.0, 1.0)}
    CostModel(**sound)
    with pytest.raises(UsageError):
        CostModel(**(sound | change))


def test_a_stage_without_a_cost_is_an_error() -> None:
    with pytest.raises(UsageError, match="has 1 stages; stage 1 has no cost"):
        CostModel((1,), (1,), (1,)).duration(Kind.F, 1)


def test_measured_costs_of_a_backward_are_those_of_whole_ones_and_of_halves() -> None:
    times = {"0F0": (0, 2), "0B0": (2, 8), "0F1": (8, 10), "0I1": (10, 11), "0W1": (11, 14)}
    spans = tuple(Span(Action.parse(text), 0, start, end) for text, (start, end) in times.items())
    cost = measured_costs(Timeline("by hand", Placement.linear(1), (spans,)))
    assert cost.duration(Kind.F, 0) == 2
    assert [cost.duration(kind, 0) for kind in (Kind.I, Kind.W, Kind.B)] == [1.25, 3.75, 5]


def test_measured_costs_count_the_pauses_between_computations_that_waited_for_nothing() -> None:
    """Rank 1 pauses before 1B0 and 1B1, for which all is there; rank 0 waits for 1B0 and 1B1, which is no pause."""
    placement, rows = Placement.linear(2), []
    for rank, times in enumerate(
        (
            {"0F0": (0, 2), "0F1": (2.5, 4.5), "0B0": (9, 12), "0B1": (15, 18)},
            {"1F0": (3, 5), "1B0": (5.25, 8), "1F1": (8.5, 10.5), "1B1": (10.75, 13.5)},
        )
    ):
        rows.append(tuple(Span(Action.parse(text), rank, start, end) for text, (start, end) in times.items()))
    cost = measured_costs(Timeline("by hand", placement, tuple(rows)))
    assert [cost.link(*link).latency for link in ((0, 1), (1, 0))] == pytest.approx([1 - 0.5, (1 + 1.5) / 2 - 0.25])
    assert cost.latency == pytest.approx((0.5 + 1) / 2)
    assert cost.forward == (2 + 0.5, 2 + 0.5)
    assert [cost.duration(Kind.B, stage) for stage in range(2)] == [3 + 0.25, 2.75 + 0.25]


def test_a_pause_is_a_part_of_what_other_actions_wait() -> None:
    """1F3 begins 3 after all is there. The others begin 0.1 after their values were made, so they pause no longer."""
    times = [[(0.0, 2.0), (2.0, 4.0), (4.0, 6.0), (6.0, 8.0)], [(2.1, 3.9), (4.1, 5.9), (6.1, 9.0), (12.0, 14.0)]]
    rows = tuple(
        tuple(Span(Action(Kind.F, rank, number), rank, start, end) for number, (start, end) in enumerate(own))
        for rank, own in enumerate(times)
    )
    cost = measured_costs(Timeline("by hand", Placement.linear(2), rows))
    assert cost.forward[1] == pytest.approx((1.8 + 1.8 + 2.9 + 2) / 4 + (3 + 0.1 + 0.1 + 0.1) / 4)
    assert cost.latency == 0


def test_late_actions_take_longer_than_others_of_their_kind_and_stage() -> None:
    """A whole backward takes what its halves take longer."""
    late = {"1F2": 3.0, "0I1": 1.0, "0W1": 0.5}
    cost = CostModel((1, 1), (1, 1), (1, 1), late=late)
    assert [cost.duration(Kind.F, 1, microbatch) for microbatch in range(4)] == [1, 1, 4, 1]
    assert cost.duration(Kind.F, 1) == 1
    assert [cost.duration(kind, 0, 1) for kind in (Kind.I, Kind.W, Kind.B)] == [2, 1.5, 3.5]
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    ran = simulate(schedule, cost)
    assert {str(span.action): span.end - span.start for span in ran if span.action.microbatch == 1}["0B1"] == 3.5
    assert ran.makespan == simulate(schedule, CostModel((1, 1), (1, 1), (1, 1))).makespan + 3
    read = read_costs('{"forward": [1, 1], "backward_input": [1, 1], "backward_weight": [1, 1], "late": {"1F2": 3}}')
    assert read.late == {"1F2": 3}
    for wrong, said in (('{"F2": 3}', "'F2' is not an action"), ('{"2F0": 3}', "late has 2F0"), ("3", "be like")):
        with pytest.raises(UsageError, match=said):
            read_costs(f'{{"forward": [1], "backward_input": [1], "backward_weight": [1], "late": {wrong}}}')


def test_a_late_action_is_measured_apart() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    even = (2.0,) * 4
    late = dict.fromkeys(("1F3", "2I5", "2W5"), 6.0)
    step = simulate(schedule, CostModel(even, even, even, latency=0.5, late=late))
    found = measured_costs(step, late_apart=True)
    assert found.late == pytest.approx(late)
    assert found.forward == pytest.approx(even)
    assert simulate(schedule, found).makespan == pytest.approx(step.makespan)
    assert measured_costs(step).forward[1] == pytest.approx(2 + 6 / 8)  # part of the mean
    assert simulate(schedule, measured_costs(step)).makespan < 0.95 * step.makespan


def test_links_and_pauses_have_the_times_of_their_own() -> None:
    """Values of rank 0 arrive while rank 1 computes, and soon after it has ended. Only rank 3 pauses before actions."""
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    slow = {(0, 1): Link(5.0)}
    even, pausing = (2.0,) * 4, (2.0, 2.0, 2.0, 3.0)
    step = simulate(schedule, CostModel(pausing, even, even, latency=0.25, links=slow))
    rows = [
        *step.rows[:3],
        tuple(replace(each, start=each.start + (each.action.kind is Kind.F)) for each in step.rows[3]),
    ]
    found = measured_costs(replace(step, rows=tuple(rows)))
    assert found.forward == pytest.approx(pausing)
    assert found.link(0, 1).latency == pytest.approx(5)
    assert found.link(1, 2).latency == found.link(2, 3).latency == pytest.approx(0.25)
    assert simulate(schedule, found).makespan == pytest.approx(step.makespan)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "dualpipe-v", "hanayo"])
def test_a_plan_has_no_pauses(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=6)
    stages = schedule.placement.num_stages
    even = CostModel((2.0,) * stages, (2.0,) * stages, (2.0,) * stages, latency=0.5)
    again = measured_costs(simulate(schedule, even))
    assert again.forward == pytest.approx(even.forward)
    assert again.backward_input == pytest.approx(even.backward_input)


def test_a_reduction_is_free_unless_it_has_a_cost() -> None:
    assert CostModel.even(Placement.linear(2)).duration(Kind.R, 1) == 0
    assert CostModel.even(Placement.looped(2, 4), reduce=6).reduce == (1.5,) * 8


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-h1", "chimera"])
def test_what_was_planned_for_reductions_is_measured_of_the_plan(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=6)
    stages = schedule.placement.num_stages
    cost = replace(CostModel.even(schedule.placement), reduce=tuple(1 + stage / 4 for stage in range(stages)))
    assert measured_costs(simulate(schedule.with_reductions(), cost)).reduce == cost.reduce
    assert measured_costs(simulate(schedule, cost)).reduce == ()


def test_any_kind_and_any_kept_content_may_have_a_price() -> None:
    priced = CostModel((1, 1), (1, 1), (1, 1), times={Kind.F: (9, 9)}, kept_bytes={Content.SAVED: (2, 3)})
    assert priced.duration(Kind.F, 0) == 1  # it has an argument of its own
    with pytest.raises(UsageError, match="times of W has length 1, forward has length 2"):
        CostModel((1, 1), (1, 1), (1, 1), times={Kind.W: (1,)})
    with pytest.raises(UsageError, match="kept_bytes of deferred of stage 1 must be finite and not negative, got -1"):
        CostModel((1, 1), (1, 1), (1, 1), kept_bytes={Content.DEFERRED: (1, -1)})
