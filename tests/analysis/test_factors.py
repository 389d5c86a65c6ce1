"""Microbatches that differ: their factors in times, transfers, memory, files and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeflow import GPT, plan
from pipeflow.core.action import Kind
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
