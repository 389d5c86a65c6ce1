from __future__ import annotations

from dataclasses import replace

import pytest

from pipeflow.core.analysis.measured_step import executed_schedule
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.schedules import SCHEDULES, make_schedule


@pytest.mark.parametrize("reduce", [None, 3.0])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_timeline_ran_is_the_schedule_that_was_simulated(name: str, reduce: float | None) -> None:
    """Also where reductions begin long after their rank came to them."""
    schedule = make_schedule(name, ranks=4, microbatches=8)
    schedule = schedule if reduce is None else schedule.with_reductions()
    timeline = simulate(schedule, CostModel.even(schedule.placement, reduce=reduce or 0))
    assert executed_schedule(timeline).rows == schedule.rows


def test_pairs_stay_pairs() -> None:
    schedule = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1")
    assert executed_schedule(simulate(schedule)).rows == schedule.rows


def test_a_reduction_of_nothing_stands_at_the_end_and_is_found_unsound() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2).with_reductions()
    timeline = simulate(schedule)
    row = tuple(span for span in timeline.rows[0] if str(span.action) != "0B1")
    without = replace(timeline, rows=(row, *timeline.rows[1:]))
    executed = executed_schedule(without)
    assert str(executed.rows[0][-1]) == "0R1"
    assert verify(executed)


def test_microbatches_must_be_as_many_as_actions_can_be_of() -> None:
    timeline = simulate(make_schedule("1f1b", ranks=1, microbatches=1))
    far = tuple(replace(span, action=replace(span.action, microbatch=99)) for span in timeline.rows[0])
    with pytest.raises(UsageError, match="2 actions are too few for 100 microbatches"):
        executed_schedule(replace(timeline, rows=(far,)))
