"""`pipeflow explain`: what it prints and writes."""

from __future__ import annotations

import json
import re
from operator import ne
from pathlib import Path

import pytest

from pipeflow.core.schedule import Schedule
from pipeflow.schedules import make_schedule
from tests.cli.run import error, out
from tests.traces.recording import Machine, ran, record

KEYS = {
    *("ranks", "stages", "microbatches", "schedule", "nearest", "placement", "violations", "step_seconds", "steps"),
    *(
        "simulated_seconds",
        "bubble",
        "idle",
        "findings",
        "costs",
        "gains",
        "critical_path",
        "names",
        "notes",
        "outside",
    ),
}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Traces of 1f1b on four ranks whose stage 2 is slow."""
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    return record(tmp_path / "traces", ran(schedule, Machine(slow={2: 1.6})))


def test_for_people(capsys: pytest.CaptureFixture[str], traces: Path) -> None:
    shown = out(capsys, "explain", traces)
    said = r"Rank 2, the busiest one, was idle for \d+\.\d% of the step; what stands out most:\s+stage 2 "
    assert re.match(said, shown)
    assert "\n1f1b: 4 ranks, 4 stages, 8 microbatches\nstep: " in shown
    assert "replayed under its own costs: " in shown
    assert re.search(r"stage 2 \(rank 2\) computes 1\.\d+ times\s+as long as the median stage", shown)
    assert re.search(r"1f1b, equal stages +\d+\.?\d* ms +\+\d", shown)
    assert re.search(r"critical path: \d+ actions of rank 2 ", shown)
    assert re.search(r"\d ms on rank \d: \dB\d waited for \dB\d on rank \d", shown)
    assert max(map(len, shown.splitlines())) <= 80
    assert " us" in out(capsys, "explain", traces, "--unit", "us")


def test_for_programs(capsys: pytest.CaptureFixture[str], traces: Path) -> None:
    read = json.loads(out(capsys, "explain", traces, "--json"))
    assert set(read) == KEYS
    assert (read["schedule"], read["names"][0]) == ("1f1b", "1f1b")
    assert set(read["costs"]) == {"forward", "backward_input", "backward_weight", "latency"}
    assert {"rank", "start", "end", "cause"} <= set(read["idle"][0])
    assert set(read["gains"][0]) == {"schedule", "step_seconds", "bubble", "peak_activations"}
    assert read["findings"][0]["where"] == 2
    assert read["gains"][-1]["schedule"].endswith(", equal stages")
    assert {each["kind"] for each in read["idle"]} >= {"fill", "waiting", "slow stage", "drain"}
    path = read["critical_path"]
    assert [each["start"] for each in path] == sorted(each["start"] for each in path)
    assert path[-1]["end"] == read["step_seconds"]


def test_what_it_writes(capsys: pytest.CaptureFixture[str], traces: Path, tmp_path: Path) -> None:
    names = {kind: tmp_path / f"explained.{kind}" for kind in ("csv", "html", "svg")}
    out(capsys, "explain", traces, *(word for kind, path in names.items() for word in (f"--{kind}", path)))
    assert names["csv"].read_text(encoding="utf-8") == make_schedule("1f1b", ranks=4, microbatches=8).to_csv()
    page = names["html"].read_text(encoding="utf-8")
    assert page.index("measured: 1f1b") < page.index("replayed: 1f1b") < page.index("best order: ")
    assert 'class="critical"' in names["svg"].read_text(encoding="utf-8")
    best, lowered = tmp_path / "best.csv", tmp_path / "lowered.csv"
    out(capsys, "explain", traces, "--best", best)
    assert "is sound" in out(capsys, "verify", best)
    out(capsys, "explain", traces, "--best", lowered, "--lowered")
    assert "0SEND_F0" in lowered.read_text(encoding="utf-8")
    read = Schedule.from_csv(lowered.read_text(encoding="utf-8")).without_reductions().without_unshards()
    assert read == Schedule.from_csv(best.read_text(encoding="utf-8"))


def test_all_that_it_writes_shows_the_same_critical_path(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traces, svg = Path(__file__).parents[2] / "docs" / "traces", tmp_path / "step.svg"
    path = [
        each["rank"] for each in json.loads(out(capsys, "explain", traces, "--json", "--svg", svg))["critical_path"]
    ]
    assert svg.read_text(encoding="utf-8").count('<rect class="critical"') == len(path)
    assert svg.read_text(encoding="utf-8").count('<path class="critical"') == sum(map(ne, path, path[1:])) == 2
    shown = " ".join(out(capsys, "explain", traces).split())
    assert f"critical path: {path.count(1)} actions of rank 1" in shown


def test_a_rank_that_is_missing_is_one_line(capsys: pytest.CaptureFixture[str], traces: Path) -> None:
    (traces / "rank3.json").unlink()
    assert error(capsys, "explain", traces).startswith("3 of 4 ranks were recorded (rank 0 runs 16 actions and ")
