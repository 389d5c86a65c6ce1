"""Recomputation, offload and unshards as options of the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeflow import CostModel, Schedule, make_schedule, simulate
from pipeflow.core.dataflow import Content
from tests.cli.run import error, out

SIZES = ["--ranks", 2, "--microbatches", 4]


def test_each_command_takes_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "recomputed.csv"
    stages = ["--recompute-stages", "0-1", "--offload-stages", "all", "--offload", 0.25]
    out(capsys, "export", "gpipe", *SIZES, *stages, "--csv", path)
    plain = make_schedule("gpipe", ranks=2, microbatches=4)
    cost = CostModel.even(plain.placement, offload=0.25)
    made = make_schedule("gpipe", ranks=2, microbatches=4, recompute=True, offload=True, cost=cost)
    assert Schedule.from_csv(path.read_text(encoding="utf-8")).rows == made.rows
    assert "gpipe with recompute with offload, 2 ranks" in out(capsys, "draw", "gpipe", *SIZES, *stages)
    assert "is sound" in out(capsys, "verify", "gpipe", *SIZES, *stages)
    found = json.loads(out(capsys, "simulate", "gpipe", *SIZES, *stages, "--json"))
    assert found["makespan"] == simulate(made, cost).makespan
    compared = json.loads(out(capsys, "compare", "gpipe", "1f1b", *SIZES, "--recompute-stages", "0", "--json"))
    assert compared["schedules"]["gpipe"]["makespan"] > simulate(plain).makespan


def test_weights_are_gathered_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["looped-bfs", *SIZES, "--chunks", 2, "--unshard-stages", "0-1"]
    words += ["--unshard", 1, "--saved-bytes", 8, "--whole-weights-bytes", 64]
    assert "gathers of weights" in out(capsys, "draw", *words)
    made = make_schedule("looped-bfs", ranks=2, microbatches=4, chunks=2, unshard=[0, 1])
    even = CostModel.even(made.placement, unshard=1, saved_bytes=8)
    timeline = simulate(made, replace(even, kept_bytes={Content.WEIGHTS: (32,) * 4}))
    found = json.loads(out(capsys, "simulate", *words, "--json"))
    assert (found["makespan"], found["peak_bytes"]) == (timeline.makespan, list(timeline.peak_bytes))
    assert timeline.peak_bytes == (64, 64)


def test_a_file_takes_stages_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text(make_schedule("gpipe", ranks=2, microbatches=3).to_csv(), encoding="utf-8")
    assert "C recomputation" in out(capsys, "draw", path, "--recompute-stages", "1")
    path.write_text(simulate(make_schedule("gpipe", ranks=2, microbatches=3)).to_json(), encoding="utf-8")
    told = error(capsys, "draw", path, "--recompute-stages", "1")
    assert told == "--recompute-stages is for schedules; a timeline shows what ran"
    told = error(capsys, "draw", path, "--unshard-stages", "1")
    assert told == "--unshard-stages is for schedules; a timeline shows what ran"


def test_ranks_that_share_a_link_are_in_the_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = {name: [1, 1] for name in ("forward", "backward_input", "backward_weight", "offload")}
    sizes = ["gpipe", *SIZES, "--offload-stages", "all", "--costs", path]
    found = []
    for groups in ([], [[0, 1]]):
        path.write_text(json.dumps(costs | {"copy_groups": groups}), encoding="utf-8")
        found.append(out(capsys, "export", *sizes, "--csv", "-").count("O"))
    assert found[0] > found[1] > 0
    path.write_text(json.dumps(costs | {"copy_groups": [0, 1]}), encoding="utf-8")
    assert "copy_groups must be a list of the ranks on each link, such as [[0, 1], [2, 3]]" in error(
        capsys, "simulate", *sizes
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--offload-stages", "all"], "the costs have no time of a copy to the host: give CostModel(offload=) per"),
        (["--unshard-stages", "2"], "there is no stage 2: the schedule has stages 0 to 1"),
        (["--recompute-stages", "5"], "there is no stage 5: the schedule has stages 0 to 1"),
        (["--recompute-stages", "1f1b"], "it must be all, or stages such as 0,2-3, got '1f1b'"),
        (["--offload-stages"], "expected one argument"),
    ],
    ids=str,
)
def test_what_they_cannot_mean_is_told(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in error(capsys, "draw", "1f1b", *SIZES, *words)


def test_half_an_offload_in_a_file_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "half.csv"
    path.write_text("0F0,0O0,0B0\n1F0,1B0", encoding="utf-8")
    assert error(capsys, "draw", path).endswith(
        "is unsound, 1 violation, the first: rank 0: 0L0 is missing: stage 0 runs 0F0, 0B0 and 0O0 for microbatch 0; "
        "see pipeflow verify"
    )
    path.write_text("0F0,0L0,0B0\n1F0,1B0", encoding="utf-8")
    assert "0O0 is missing: stage 0 runs 0F0, 0B0 and 0L0 for microbatch 0" in error(capsys, "draw", path)
