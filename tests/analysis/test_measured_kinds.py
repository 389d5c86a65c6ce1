"""The costs of recomputations and copies that a timeline shows."""

from __future__ import annotations

from pipeflow import CostModel, Schedule, make_schedule, measured_costs, simulate, with_offload, with_recompute


def test_costs_of_a_simulation_are_measured_again() -> None:
    plain = make_schedule("gpipe", ranks=3, microbatches=3)
    cost = CostModel((4, 4, 4), (3, 3, 3), (3, 3, 3), recompute=(2, 1, 5), offload=(1, 0.5, 2))
    schedule = with_offload(with_recompute(plain, [0, 1]), cost, [1, 2])
    found = measured_costs(simulate(schedule, cost))
    assert found.recompute == (2, 1, 4)  # nothing else is known of a stage that is not recomputed than its forward
    assert found.offload == (1.25, 0.5, 2)  # of stage 0: the mean of the others
    assert simulate(schedule, found).makespan == simulate(schedule, cost).makespan


def test_without_kinds_they_have_no_costs() -> None:
    found = measured_costs(simulate(Schedule.from_csv("0F0,0B0")))
    assert (found.recompute, found.offload) == ((), ())
