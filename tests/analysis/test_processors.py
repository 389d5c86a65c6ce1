"""Ranks that share processors: with enough of them it is the usual simulation, and with fewer all of them are used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeflow.core.analysis.simulation import simulate, simulate_shared
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import ScheduleError
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import SCHEDULES, make_schedule
from tests.analysis.test_simulate import random_cost
from tests.families import make_near


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_a_processor_for_each_stream_it_is_the_usual_simulation(name: str) -> None:
    for schedule in (made := make_near(name, ranks=3, microbatches=5), made.with_reductions()):
        cost = replace(random_cost(schedule.placement.num_stages, 1), microbatch_factors=(1, 0.5, 2, 1.5, 0.7))
        usual, shared = simulate(schedule, cost), simulate_shared(schedule, cost, 6)
        assert {span.action: span.start for span in shared} == pytest.approx(
            {span.action: span.start for span in usual}
        )
        assert {span.action: span.end for span in shared} == pytest.approx({span.action: span.end for span in usual})


@pytest.mark.parametrize("name", SCHEDULES)
def test_processors_are_neither_idle_nor_used_twice(name: str) -> None:
    """A step takes as long as on one's own processors at least, and as all work on the shared ones; and at most both
    together, if transfers take no time.
    """
    schedule = make_near(name, ranks=4, microbatches=6).with_reductions()
    cost = CostModel.even(schedule.placement, 1, 2, 0.5, reduce=0.3)
    alone = simulate(schedule, cost)
    work = sum(span.end - span.start for span in alone)
    for processors in (0.5, 1.0, 2.0):
        took = simulate_shared(schedule, cost, processors).makespan
        least = max(alone.makespan, work / processors)
        assert least * (1 - 1e-9) <= took <= (alone.makespan + work / processors) * (1 + 1e-9)
    assert simulate_shared(schedule, cost, 1.0).makespan == pytest.approx(work)  # something can always run


def test_two_ranks_on_one_processor() -> None:
    """Rank 0 computes alone for 2 s. Then both halves of the work of 2 s each take 4 s, and the last 1 s runs alone."""
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1F1")
    cost = CostModel((2, 3), (0, 0), (0, 0))
    first, last = simulate_shared(schedule, cost, 1.0).rows
    assert [(span.start, span.end) for span in first] == [(0, 2), (2, 6)]
    assert [(span.start, span.end) for span in last] == [(2, 7), (7, 10)]


def test_a_transfer_needs_no_processor() -> None:
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1F1")
    cost = CostModel((2, 2), (0, 0), (0, 0), latency=1)
    first, last = simulate_shared(schedule, cost, 1.0).rows
    assert [(span.start, span.end) for span in first] == [(0, 2), (2, 5)]  # 1 s of it alone
    assert [(span.start, span.end) for span in last] == [(3, 6), (6, 8)]


def test_a_reduction_takes_its_share() -> None:
    """On one processor, for two ranks with a copy of each stage."""
    schedule = make_schedule("chimera", ranks=2, microbatches=2).with_reductions()
    cost = CostModel.even(schedule.placement, 1, 1, 1, reduce=2)
    assert simulate_shared(schedule, cost, 1.0).makespan == pytest.approx(2 * 2 * 3 + 2 * 2 * 2)


def test_unsound_schedules_and_other_costs_are_refused() -> None:
    stuck = Schedule.from_csv("0F0,0B0\n1B0,1F0")
    with pytest.raises(ScheduleError, match="cannot run to its end"):
        simulate_shared(stuck, CostModel((1, 1), (1, 1), (1, 1)), 1.0)
