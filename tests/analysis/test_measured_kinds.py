"""The costs of recomputations and copies that a timeline shows."""

from __future__ import annotations

import pytest

from pipeflow import CostModel, Schedule, make_schedule, measured_costs, simulate, with_offload, with_recompute


def test_costs_of_a_simulation_are_measured_again() -> None:
    plain = make_schedule("gpipe", ranks=3, microbatches=3)
    cost = CostModel((4, 4, 4), (3, 3, 3), (3, 3, 3), recompute=(2, 1, 5), offload=(1, 0.5, 2))
    schedule = with_offload(with_recompute(plain, [0, 1]), cost, [1, 2])
    found = measured_costs(simulate(schedule, cost))
    assert found.recompute == (2, 1, 4)  # nothing else is known of a stage that is not recomputed than its forward
    assert found.offload == (1.25, 0.5, 2)  # of stage 0: the mean of the others
    assert simulate(schedule, found).makespan == simulate(schedule, cost).makespan


def test_exchanges_are_measured_again_outside_of_pairs() -> None:
    schedule = make_schedule("dualpipe-v", ranks=2, microbatches=6)
    cost = CostModel((4, 4, 4, 4), (3, 3, 3, 3), (2, 2, 2, 2), exchange=(0.25, 0.5, 0, 0.6))
    assert measured_costs(simulate(schedule.without_pairs(), cost)).exchange == pytest.approx(cost.exchange)
    assert measured_costs(simulate(schedule, cost)).exchange[1] == pytest.approx(0.5)
    assert measured_costs(simulate(schedule)).exchange == ()


def test_without_kinds_they_have_no_costs() -> None:
    found = measured_costs(simulate(Schedule.from_csv("0F0,0B0")))
    assert (found.recompute, found.offload) == ((), ())
