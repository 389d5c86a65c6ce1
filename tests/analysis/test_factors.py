"""Microbatches that differ: their factors in times, transfers, memory, files and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeflow import GPT, plan
from pipeflow.core.action import Kind
from pipeflow.core.analysis.measured_step import measured_costs, measured_factors
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel, read_costs
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.tools.cli import main

TWO = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
COST = CostModel((1, 1), (1, 1), (1, 1), bandwidth=2, activation_bytes=(1, 1), microbatch_factors=(1, 2))


def test_times_and_transfers_are_multiples() -> None:
    first, last = simulate(TWO, COST).rows
    assert [(span.start, span.end) for span in last] == [(1.5, 2.5), (2.5, 4.5), (4.5, 6.5), (6.5, 10.5)]
    assert [(span.start, span.end) for span in first] == [(0, 1), (1, 3), (5, 7), (11.5, 15.5)]


def test_a_pair_is_one_of_two_microbatches() -> None:
    pairs = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    cost = CostModel((1,), (1,), (1,), overlap=0.5, microbatch_factors=(4, 3))
    assert [span.end for span in simulate(pairs, cost)] == pytest.approx([4, 4 + 9.5 * 3 / 11, 13.5, 19.5])
    exchanged = replace(cost, overlap=0, exchange=(0.25,))
    assert [span.end for span in simulate(pairs, exchanged)] == pytest.approx([4, 4 + 8.25 * 3 / 11, 12.25, 18.25])


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors_of_one_change_nothing(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=6).with_reductions()
    cost = CostModel.even(
        schedule.placement, 0.7, 1.1, 0.3, 0.1, saved_bytes=3, deferred_bytes=1, reduce=2, overlap=0.5
    )
    alike, differing = simulate(schedule, cost), simulate(schedule, replace(cost, microbatch_factors=(1.0,) * 6))
    assert differing.rows == alike.rows
    assert differing.peak_bytes == alike.peak_bytes
    assert differing.peak_activations == alike.peak_activations


def test_a_reduction_has_no_factor() -> None:
    cost = CostModel((1,), (1,), (1,), reduce=(5,), microbatch_factors=(1, 3))
    assert cost.duration(Kind.R, 0, 1) == 5
    assert simulate(Schedule.from_csv("0F0,0B0,0F1,0B1").with_reductions(), cost).exposed == 5


def test_memory_is_that_of_the_microbatches_alive() -> None:
    timeline = simulate(TWO, replace(COST, saved_bytes=(10, 10), deferred_bytes=(2, 2)))
    assert timeline.peak_bytes == (30, 20)
    assert timeline.peak_activations == (3, 2)
    assert not verify(TWO, memory_cap=(3, 2), microbatch_factors=(1, 2))
    [violation] = verify(TWO, memory_cap=(2, 2), microbatch_factors=(1, 2))
    assert str(violation) == (
        "rank 0, position 1: with 0F1 the rank keeps 3 microbatches of activations; expected at most 2; the least cap "
        "that works here is 3"
    )
    [violation] = verify(TWO.forward_only(), memory_cap=1, microbatch_factors=(1, 2))[1:]
    assert violation.rank == 1


def test_wrong_numbers_of_factors_are_refused() -> None:
    wrong = replace(COST, microbatch_factors=(1.0,) * 3)
    with pytest.raises(UsageError, match="has 3 numbers, but the schedule has 2 microbatches: give one per microbatch"):
        simulate(TWO, wrong)
    with pytest.raises(UsageError, match="has 3 numbers"):
        verify(TWO, memory_cap=3, microbatch_factors=wrong.microbatch_factors)
    with pytest.raises(UsageError, match="microbatch_factors of microbatch 1 must be finite and not negative, got -1"):
        replace(COST, microbatch_factors=(1.0, -1.0))


def test_factors_are_read_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"forward": [1, 1], "backward_input": [1, 1], "backward_weight": [1, 1], "microbatch_factors": [1, 2]}
    assert read_costs(json.dumps(given)).microbatch_factors == (1, 2)
    with pytest.raises(UsageError, match="microbatch_factors of microbatch 1 must be a number, got 'x'"):
        read_costs(json.dumps(given | {"microbatch_factors": [1, "x"]}))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    command = ["verify", "gpipe", "--ranks", "2", "--microbatches", "2", "--costs", str(path), "--memory-cap"]
    assert main([*command, "3"]) == 0
    assert main([*command, "2"]) == 1
    assert "keeps 3 microbatches" in capsys.readouterr().out


def test_a_timeline_keeps_its_factors_in_a_file() -> None:
    timeline = simulate(TWO, replace(COST, saved_bytes=(10, 10)))
    again = Timeline.from_json(timeline.to_json())
    assert again == timeline
    assert again.peak_bytes == (30, 20)
    short = timeline.to_json().replace("[1, 2]", "[1]")
    with pytest.raises(UsageError, match="microbatch_factors: there are 1 for 2 microbatches"):
        Timeline.from_json(short)


def test_a_plan_counts_factors() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    even, uneven = (
        plan(GPT.named("gpt2-small"), schedule, flops=1e12, microbatch_factors=factors)
        for factors in ((), (1, 1, 1, 3))
    )
    assert uneven.timeline.makespan > even.timeline.makespan * 1.4
    assert uneven.peak_bytes > even.peak_bytes


# tables by stage and microbatch

TABLE = ((1, 3, 1), (2, 1, 1))
THREE = Schedule.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2")
PRICED = CostModel((1, 1), (1, 1), (1, 1), bandwidth=2, activation_bytes=(4, 4), saved_bytes=(10, 100))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_with_equal_rows_is_a_sequence(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=6)
    cost, row = CostModel.even(schedule.placement, saved_bytes=3), (1, 0.5, 2, 3, 1, 0.7)
    one = replace(cost, microbatch_factors=row)
    stages = schedule.placement.num_stages
    tables: list[Any] = [[row] * stages, {stage: [*row] for stage in range(stages)}]
    for table in tables:
        assert replace(cost, microbatch_factors=table) == one
    apart = replace(cost, microbatch_factors=((row,) * (stages - 1) + ((*row[:-1], 0.7 + 1e-12),)))
    assert len(apart.microbatch_factors) == stages
    assert simulate(schedule, apart).makespan == pytest.approx(simulate(schedule, one).makespan)
    assert simulate(schedule, apart).peak_bytes == pytest.approx(simulate(schedule, one).peak_bytes)


def test_times_and_transfers_have_the_factor_of_their_stage() -> None:
    """By hand: an activation of 4 bytes takes 2, times the factor of stage 0, and so does its gradient."""
    first, last = simulate(THREE, replace(PRICED, microbatch_factors=TABLE)).rows
    assert [(span.start, span.end) for span in last] == [(3, 5), (5, 9), (10, 11), (11, 13), (13, 14), (14, 16)]
    assert [(span.start, span.end) for span in first] == [(0, 1), (1, 4), (4, 5), (11, 13), (19, 25), (25, 27)]
    assert replace(PRICED, microbatch_factors=TABLE).duration(Kind.B, 0, 1) == 6


def test_bytes_have_the_factor_of_their_stage() -> None:
    timeline = simulate(THREE, replace(PRICED, microbatch_factors=TABLE))
    assert timeline.peak_bytes == (50, 200)
    assert timeline.peak_activations == (5, 2)
    assert not verify(THREE, memory_cap=(5, 2), microbatch_factors=TABLE)
    assert [each.rank for each in verify(THREE, memory_cap=(4.9, 1.9), microbatch_factors=TABLE)] == [0, 1]


def test_stages_that_a_mapping_leaves_out_have_the_factor_1() -> None:
    given: Any = {1: [2, 1, 1]}
    assert replace(PRICED, microbatch_factors=given).microbatch_factors == ((1, 1, 1), (2, 1, 1))


@pytest.mark.parametrize("given", ["[[1, 3, 1], [2, 1, 1]]", '{"0": [1, 3, 1], "1": [2, 1, 1]}'])
def test_a_table_is_read_from_files(given: str) -> None:
    text = f'{{"forward": [1, 1], "backward_input": [1, 1], "backward_weight": [1, 1], "microbatch_factors": {given}}}'
    cost = read_costs(text)
    assert cost.microbatch_factors == TABLE
    timeline = simulate(THREE, replace(cost, saved_bytes=(10, 100)))
    assert Timeline.from_json(timeline.to_json()) == timeline
    with pytest.raises(UsageError, match="microbatch_factors: there are 2 for 3 microbatches"):
        Timeline.from_json(timeline.to_json().replace(", 1.0], [2.0, 1.0, 1.0]]", "], [2.0, 1.0]]"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (((1, 2), (1, 2), (1, 3)), "has 3 rows, but there are costs of 2 stages: give one row per stage"),
        (((1, 2), (1,)), "stage 1 has 1 factors, but each stage needs one factor per microbatch"),
        (((1, 2), 3), "stage 1 has 3, but each stage needs one factor per microbatch"),
        (((1, 2), (1, -2)), "of stage 1, microbatch 1 must be finite and not negative, got -2"),
        (((1, 2), (1, "x")), "of stage 1, microbatch 1 must be a number, got 'x'"),
        ({2: (1, 2)}, "has a row for 2, but stages are numbered from 0 to 1"),
        ({0: 3}, "of stage 0 must be a list of numbers, got 3"),
        (3, "must be a list of numbers, or one such list per stage, got 3"),
    ],
)
def test_wrong_tables_are_refused(given: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CostModel((1, 1), (1, 1), (1, 1), microbatch_factors=given)  # type: ignore[arg-type]


def test_a_table_of_other_microbatches_is_refused() -> None:
    with pytest.raises(UsageError, match="has 2 numbers, but the schedule has 3 microbatches"):
        simulate(THREE, replace(PRICED, microbatch_factors=((1, 2), (1, 3))))
    with pytest.raises(UsageError, match="has 3 rows, but there are costs of 2 stages"):
        verify(THREE, memory_cap=9, microbatch_factors=((1, 2, 3), (1, 2, 3), (1, 2, 4)))
    given = '{"forward": [1], "backward_input": [1], "backward_weight": [1], "microbatch_factors": {"first": [1]}}'
    with pytest.raises(UsageError, match="with a list for some stages, got 'first'"):
        read_costs(given)


def test_factors_by_stage_and_microbatch_are_measured() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    cost = CostModel.even(schedule.placement, 1, 1.5, 0.5)
    table: Any = [[1.0] * 8 for _ in range(4)]
    table[0][3], table[2][5], table[2][6] = 3, 2, 0.5
    ran = simulate(schedule, replace(cost, microbatch_factors=table))
    found = measured_costs(ran, by_microbatch=True)
    assert found.microbatch_factors == tuple(map(tuple, table))
    assert (found.forward, found.backward_input) == (cost.forward, (1, 1, 1, 1))
    assert simulate(schedule, found).makespan == pytest.approx(ran.makespan)
    row = (1, 1, 1, 2, 1, 1, 3, 1)
    assert measured_factors(simulate(schedule, replace(cost, microbatch_factors=row))) == pytest.approx(row)
    assert measured_factors(simulate(schedule, cost)) == ()


def test_a_factor_that_a_backward_does_not_confirm_is_not_measured() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    cost = CostModel.even(schedule.placement)
    assert measured_factors(simulate(schedule, replace(cost, late={"1F3": 4.0}))) == ()
    assert measured_factors(simulate(schedule, replace(cost, late={"1F3": 4.0, "1I3": 4.0, "1W3": 4.0}))) != ()
    assert measured_factors(simulate(schedule.forward_only(), replace(cost, late={"1F3": 4.0}))) == ()


def test_a_plan_counts_a_table() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    row, none = (1, 1, 1, 3), (1, 1, 1, 1)
    makespans = [
        plan(GPT.named("gpt2-small"), schedule, flops=1e12, microbatch_factors=factors).timeline.makespan
        for factors in ((none, none), (row, none), (row, row))
    ]
    assert makespans[0] < makespans[1] < makespans[2]
