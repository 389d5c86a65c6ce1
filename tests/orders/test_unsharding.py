"""Schedules with unshards: sound, with as few whole stages as they say, and simulated with what is exposed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeflow import (
    SCHEDULES,
    Action,
    CostModel,
    Kind,
    Schedule,
    Timeline,
    UsageError,
    critical_path,
    dependency_graph,
    lower,
    make_schedule,
    simulate,
    verify,
    with_unshard,
)
from pipeflow.core.analysis.measured_step import executed_schedule, measured_costs
from pipeflow.core.analysis.simulation import simulate_shared
from pipeflow.core.dataflow import Content, Stream
from pipeflow.core.soundness.transfers import verify_programs
from tests.families import make_near


def costs(schedule: Schedule, unshard: float = 0.5) -> CostModel:
    even = CostModel.even(schedule.placement, 2, 2, 2, saved_bytes=2, unshard=unshard)
    whole = (20 / schedule.placement.chunks_per_rank,) * schedule.placement.num_stages
    return replace(even, kept_bytes={Content.WEIGHTS: whole})


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_takes_unshards(name: str) -> None:
    plain = make_near(name, ranks=4, microbatches=8)
    for most, ahead in ((3, None), (2, 0)):
        schedule = with_unshard(plain, most=most, ahead=ahead)
        assert verify(schedule) == verify(schedule.with_reductions()) == []
        assert schedule.without_unshards().rows == plain.rows
        assert schedule.forward_only().rows == plain.forward_only().rows
        assert verify(schedule.first(5)) == []
        timeline, before = simulate(schedule, costs(plain)), simulate(plain, costs(plain))
        assert timeline.makespan >= before.makespan
        whole = 20 / plain.placement.chunks_per_rank * min(most, len(plain.placement.stages_of(0)))
        assert max(timeline.peak_bytes) <= max(before.peak_bytes) + whole
        assert simulate(schedule, costs(plain, 0)).makespan == before.makespan
        assert executed_schedule(simulate(schedule, costs(plain))).without_unshards().rows == plain.rows
        assert Schedule.from_csv(schedule.to_csv(), plain.placement, 8, name=schedule.name) == schedule
        assert Timeline.from_json(timeline.to_json()) == timeline
        assert verify_programs(lower(schedule)) == []


INTERLEAVED = make_schedule("looped-bfs", ranks=2, microbatches=4, chunks=3)


def test_a_gather_in_time_is_hidden_and_a_late_one_is_exposed() -> None:
    cost, plain = costs(INTERLEAVED, unshard=0.9), simulate(INTERLEAVED, costs(INTERLEAVED)).makespan
    assert simulate(with_unshard(INTERLEAVED, most=2), cost).makespan == pytest.approx(plain + 0.3)  # the first one
    late = simulate(with_unshard(INTERLEAVED, most=2, ahead=0), cost)
    assert late.makespan > plain + 0.3 * 3
    spans = {str(span.action): span for span in late}
    assert spans["0F0"].start == spans["0U0"].end == 0.3
    assert spans["2F0"].start == spans["2U0"].end
    assert spans["2U0"].start == spans["0F3"].end
    assert spans["0H0"].start == spans["0H0"].end >= spans["0F3"].end
    reasons = [str(cause) for cause in critical_path(late) if cause.value is not None]
    assert "2F0 on rank 0 waited for the whole weights of stage 2, microbatch 0 from rank 0" in reasons
    assert [span.action.kind for span in late.on(Stream.GATHER)[0][:3]] == [Kind.U, Kind.H, Kind.U]
    graph = dependency_graph(with_unshard(INTERLEAVED))
    assert graph.edges[Action(Kind.U, 0, 0), Action(Kind.F, 0, 0)]["reason"] == "whole weights of stage 0, microbatch 0"
    assert measured_costs(late).durations[Kind.U] == pytest.approx((0.3,) * 6)


def test_ranks_on_few_processors_wait_for_gathers_too() -> None:
    schedule = with_unshard(INTERLEAVED, most=2, ahead=0)
    assert simulate_shared(schedule, costs(schedule), 1e9).rows == simulate(schedule, costs(schedule)).rows


def test_whole_weights_count_from_their_unshard_to_their_reshard() -> None:
    schedule = Schedule.from_csv("0F0,0UNSHARD,1F0,0B0", num_microbatches=1)
    schedule = Schedule.from_csv("0UNSHARD,0F0,0B0,0RESHARD,1UNSHARD,1F0,1B0,1RESHARD")
    kept = {Content.WEIGHTS: (10.0, 20.0)}
    cost = CostModel((1, 1), (1, 1), (1, 1), saved_bytes=(1, 1), unshard=(0.5, 0.5), kept_bytes=kept)
    schedule = Schedule.from_csv("0UNSHARD,0F0,1UNSHARD,1F0,1B0,1RESHARD,0B0,0RESHARD")
    memory = simulate(schedule, cost).memory(0)
    assert memory == ((0, 10), (0.5, 11), (1.5, 31), (2, 32), (5, 11), (7, 0))
    assert simulate(schedule, replace(cost, kept_bytes={})).peak_bytes == (2,)
    assert simulate(schedule, replace(cost, microbatch_factors=(2,))).memory(0)[:3] == ((0, 10), (0.5, 12), (2.5, 32))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("0UNSHARD,0F0,0B0", "0U0 is never ended"),
        ("0F0,0B0,0RESHARD", "0F0 runs without the whole weights of stage 0"),
        ("0F0,0B0,0RESHARD", "0H0 ends nothing"),
        ("0UNSHARD,0F0,0RESHARD,0B0", "0B0 runs without the whole weights of stage 0"),
        ("0UNSHARD,0F0,0U0,0B0,0RESHARD", "0U0 comes while 0U0 lasts"),
        ("0UNSHARD,0F0,0H0,0U0,0B0,0H0", "0U0 runs again"),
        ("0UNSHARD,0F0,0B0,0H1", "0H1 is wrong here"),
        ("0F0,0B0,0U3,0H3", "0U3 does not exist"),
    ],
)
def test_what_is_wrong_is_said(row: str, problem: str) -> None:
    assert problem in [violation.problem for violation in verify(Schedule.from_csv(row))]


def test_bad_input_is_told() -> None:
    with pytest.raises(UsageError, match=r"has unshards already: give schedule\.without_unshards"):
        with_unshard(with_unshard(INTERLEAVED))
    with pytest.raises(UsageError, match="there is no stage 6"):
        with_unshard(INTERLEAVED, stages=[6])
    with pytest.raises(UsageError, match="most is at least 1 and ahead at least 0; got most=0 and ahead=None"):
        with_unshard(INTERLEAVED, most=0)
    with pytest.raises(UsageError, match=r"with most=1, stage 1 would be gathered more often than its 8 microbatches"):
        with_unshard(make_schedule("zb-v", ranks=2, microbatches=8), most=1)


def test_only_some_stages_may_be_sharded() -> None:
    schedule = with_unshard(INTERLEAVED, stages=[2], most=1)
    assert {action.stage for action in schedule.actions(0) if action.kind is Kind.U} == {2}
    assert all(action.kind is not Kind.U for action in schedule.actions(1))
