"""A step is planned again from what was measured of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeflow import CostModel, Schedule, Timeline, UsageError, make_schedule, simulate, verify
from pipeflow.planning.replanning import replan
from tests.cli.run import error, out

SLOW_STAGE = (1.0, 1.5, 1.0, 1.0)


def measured(name: str = "1f1b", *, microbatches: int = 12, times: tuple[float, ...] = SLOW_STAGE) -> Timeline:
    chunks = {"chunks": 2} if name == "interleaved-1f1b" else {}
    schedule = make_schedule(name, ranks=4 // (2 if chunks else 1), microbatches=microbatches, **chunks)
    return simulate(schedule, CostModel(times, times, times, latency=0.1))


def test_the_schedule_that_ran_is_planned_as_it_was_measured() -> None:
    step = measured()
    found = replan(step)
    assert found.now.timeline.makespan == pytest.approx(step.makespan)
    assert found.cost.forward == pytest.approx(SLOW_STAGE)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
def test_the_best_is_sound_no_slower_and_keeps_no_more(name: str) -> None:
    step = measured(name)
    found = replan(step, candidates=100)
    assert verify(found.best.schedule) == []
    assert found.best.schedule.placement == step.placement
    assert found.best.timeline.makespan <= step.makespan * (1 + 1e-9)
    for mine, theirs in zip(found.best.timeline.peak_activations, step.peak_activations, strict=True):
        assert mine <= theirs + 1e-9
    assert found.gain(found.best) == pytest.approx(1 - found.best.timeline.makespan / step.makespan)


def test_split_backwards_gain_around_a_slow_stage() -> None:
    """Of the slow stage itself 12 x 4.5 are computed; 1F1B takes 7 more, and a split backward fills most of it."""
    found = replan(measured())
    assert found.now.timeline.makespan == pytest.approx(61)
    assert found.best.timeline.makespan < 57
    names = [each.schedule.name for each in found.candidates]
    assert {"zb-h1", "zb-h2", "zb-auto"} <= set(names)
    fits = [each.fits for each in found.candidates]
    assert fits == sorted(fits, reverse=True)  # those that keep more come last


def test_a_step_in_slices_is_planned_in_as_many() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=6, slices=3)
    cost = replace(CostModel.even(schedule.placement, 1, 1, 1, 0.02), attention=0.5, slice_ends=(1, 2, 3))
    found = replan(simulate(schedule, cost))
    assert found.now.timeline.makespan == pytest.approx(simulate(schedule, cost).makespan)
    assert {each.schedule.slices for each in found.candidates} == {3}
    assert found.best.schedule.name == "zb-h1"
    assert found.gain(found.best) > 0.02


def test_microbatches_that_differ_have_factors() -> None:
    """All that they take is longer, so a plan may exchange them; single late actions stay late."""
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    cost = replace(CostModel.even(schedule.placement), microbatch_factors=(1, 1, 1, 3, 1, 1, 1, 1), late={"2F6": 2.0})
    step = simulate(schedule, cost)
    found = replan(step)
    assert found.cost.microbatch_factors == pytest.approx(cost.microbatch_factors)
    assert found.cost.late == pytest.approx(cost.late)
    assert found.now.timeline.makespan == pytest.approx(step.makespan)
    assert found.best.timeline.makespan < step.makespan


def test_reductions_stay_in_the_plan() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4).with_reductions()
    step = simulate(schedule, CostModel((1, 1), (1, 1), (1, 1), reduce=(5, 5)))
    found = replan(step, candidates=20)
    assert found.now.timeline.makespan == pytest.approx(step.makespan)
    assert all(each.timeline.makespan > step.makespan - 5 for each in found.candidates)


def test_a_placement_in_two_directions_is_planned_without_a_search() -> None:
    found = replan(simulate(make_schedule("dualpipe", ranks=4, microbatches=8)))
    assert "zb-auto" not in [each.schedule.name for each in found.candidates]
    assert "chimera" in [each.schedule.name for each in found.candidates]


def test_a_step_without_backwards_is_refused() -> None:
    with pytest.raises(UsageError, match="has no backwards: trace a step of training"):
        replan(simulate(make_schedule("1f1b", ranks=2, microbatches=2).forward_only()))


def test_the_command_says_what_a_change_gains_and_writes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run, best = tmp_path / "run.json", tmp_path / "best.csv"
    run.write_text(measured().to_json(), encoding="utf-8")
    shown = out(capsys, "plan", "--measured", run, "--csv", best)
    assert max(map(len, shown.splitlines())) <= 80
    assert "1f1b: measured 61" in shown
    assert "of the step within the same memory" in shown
    found = json.loads(out(capsys, "plan", "--measured", run, "--json"))
    assert found["best"]["gain"] == pytest.approx(1 - found["best"]["step_seconds"] / found["measured_seconds"])
    assert verify(Schedule.from_csv(best.read_text(encoding="utf-8"))) == []


def test_the_command_refuses_what_is_no_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}", encoding="utf-8")
    assert "bad.json: this is not a timeline" in error(capsys, "plan", "--measured", bad)
    assert "No such file" in error(capsys, "plan", "--measured", tmp_path / "none.json")
    assert "say which model: pipeflow plan MODEL" in error(capsys, "plan")


def test_an_order_that_splits_backwards_pays_for_more_pauses() -> None:
    """Where the engine works before each action, as the pauses of the measured step show."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    simulated = simulate(schedule, CostModel.even(schedule.placement, 1, 1, 1))
    rows = tuple(
        tuple(replace(span, start=span.start + (0.25 if number else 0.0)) for number, span in enumerate(row))
        for row in simulated.rows
    )
    found = replan(replace(simulated, rows=rows))
    assert found.cost.backward_weight < found.cost_in_halves.backward_weight
    split = next(each for each in found.candidates if each.schedule.name == "zb-h1")
    assert found.cost_of(split.schedule) is found.cost_in_halves
    assert found.cost_of(found.now.schedule) is found.cost
    again = replan(split.timeline)
    assert again.cost_in_halves == again.cost
