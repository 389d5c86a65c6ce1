"""A draft is the simulation as far as it goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeflow.core.action import Action, Kind
from pipeflow.core.analysis.simulation import draft, simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.dataflow import Content, Value
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import SCHEDULES, make_schedule


def cost_of(schedule: Schedule) -> CostModel:
    return CostModel.even(schedule.placement, 2, transfer=0.25, saved_bytes=3, reduce=1.5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_sound_schedule_is_simulated(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=6).with_reductions()
    drawn = draft(schedule, cost_of(schedule))
    assert drawn.timeline == simulate(schedule, cost_of(schedule))
    assert drawn.stuck == ()


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_runs_before_an_action_that_is_missing_keeps_its_times_and_all_else_comes_behind(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=6)
    cost = cost_of(schedule)
    without = Action(Kind.F, 0, 4)
    rank = schedule.placement.rank_of(0, 4)
    rows = [*schedule.rows]
    rows[rank] = tuple(entry for entry in rows[rank] if without not in (entry, getattr(entry, "forward", None)))
    drawn = draft(replace(schedule, rows=tuple(rows)), cost)
    whole = {span.action: span for span in simulate(schedule, cost)}
    end = 0.0
    for each, row in enumerate(drawn.timeline.rows):
        first = drawn.first_stuck(each)
        assert first is not None
        end = max([end, *(span.end for span in row[:first])])
    for each, row in enumerate(drawn.timeline.rows):
        first = drawn.first_stuck(each)
        assert all(span.start >= end for span in row[first:])
        assert all(span.start <= whole[span.action].start for span in row[:first])  # nothing stands in its way
        assert list(drawn.places[each]) == sorted(drawn.places[each])
    assert Value(Content.ACTIVATION, 0, 4) in {each.value for each in drawn.stuck}


def test_a_rank_stops_at_an_action_that_is_not_its_own() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    for foreign in (Action(Kind.F, 1, 0), Action(Kind.F, 9, 0), Action(Kind.F, 0, 9)):
        rows = ((schedule.rows[0][0], foreign, *schedule.rows[0][1:]), schedule.rows[1])
        drawn = draft(replace(schedule, rows=rows), CostModel.even(schedule.placement))
        assert drawn.first_stuck(0) == 1
        assert drawn.stuck[0].value is None
