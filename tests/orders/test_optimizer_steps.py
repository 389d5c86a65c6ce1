"""Schedules with the optimizer's steps: sound, after reductions, and as long as they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeflow import (
    SCHEDULES,
    CostModel,
    Kind,
    Schedule,
    make_schedule,
    measured_costs,
    simulate,
    verify,
    with_optimizer_step,
)
from pipeflow.core.analysis.lowering import lower
from pipeflow.core.analysis.measured_step import executed_schedule
from pipeflow.core.dataflow import Stream
from pipeflow.core.soundness.transfers import verify_programs
from pipeflow.schedules.orders.additions import without_optimizer_step
from tests.families import make_near


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_sound_and_longer_by_the_steps_of_a_rank(name: str) -> None:
    schedule = make_near(name, ranks=4, microbatches=8)
    stepping = with_optimizer_step(schedule)
    assert verify(stepping) == verify(stepping.with_reductions()) == verify_programs(lower(stepping)) == []
    cost = CostModel.even(schedule.placement, optimizer=2)
    timeline = simulate(stepping, cost)
    assert timeline.makespan == pytest.approx(simulate(schedule, cost).makespan + 2 * _copies(schedule))
    assert executed_schedule(timeline).rows == stepping.rows
    assert measured_costs(timeline).optimizer == pytest.approx(cost.optimizer)
    assert without_optimizer_step(stepping) == schedule
    assert verify(stepping.first(5)) == []


def _copies(schedule: Schedule) -> float:
    """How many stages a rank holds, as a multiple of its share."""
    return len(schedule.placement.stages_of(0)) / schedule.placement.chunks_per_rank


def test_a_step_waits_for_the_reduction_of_its_stage() -> None:
    schedule = with_optimizer_step(make_schedule("gpipe", ranks=2, microbatches=2).with_reductions())
    timeline = simulate(schedule, CostModel.even(schedule.placement, reduce=5, optimizer=1))
    for reduced, computed in zip(timeline.on(Stream.REDUCE), timeline.on(Stream.COMPUTE), strict=True):
        assert computed[-1].action.kind is Kind.S
        assert computed[-1].start == reduced[-1].end


def test_what_is_wrong_is_told() -> None:
    schedule = with_optimizer_step(make_schedule("gpipe", ranks=2, microbatches=2))
    [lost] = verify(replace(schedule, rows=(schedule.rows[0][:-1], schedule.rows[1])))
    assert lost.problem == "stage 0 has no optimizer step"
    row = schedule.rows[0]
    [early] = verify(replace(schedule, rows=((*row[:-2], row[-1], row[-2]), schedule.rows[1])))
    assert (early.problem, early.expected) == (
        "0S1 is wrong here",
        "it after 0B1, the last weight gradient of its stage",
    )
    before = Schedule.from_csv("0F0,0B0,0S0,0REDUCE_GRAD")
    [used_up] = verify(before)
    assert (used_up.problem, used_up.expected) == ("0S0 is wrong here", "it after 0R0")
