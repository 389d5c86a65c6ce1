from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.schedule import Schedule
from pipeflow.schedules import make_schedule
from pipeflow.tools.cli.compare import difference_lines
from tests.cli.run import error, out


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A step of 1f1b that was slower on its second stage, as it was kept."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    cost = CostModel((0.001, 0.002), (0.001, 0.001), (0.001, 0.001), latency=0.0005, unit="s")
    path = tmp_path / "measured.json"
    path.write_text(simulate(schedule, cost).to_json(), encoding="utf-8")
    return path


def moves(first: str, second: str) -> list[str]:
    return list(difference_lines(Schedule.from_csv(first, name="one"), Schedule.from_csv(second, name="other")))


def test_the_fewest_actions_that_moved_are_named() -> None:
    assert moves("0F0,0F1,0F2,0B0,0B1,0B2\n1F0", "0F0,0B0,0F1,0F2,0B1,0B2\n1F0") == [
        "rank 0  position 1: the first has 0F1, the second 0B0",
        "        moved: 0B0 3 to 1",
        "rank 1  the same",
    ]


def test_actions_of_one_schedule_alone_are_named() -> None:
    assert moves("0F0,0B0\n1F0,1B0", "0F0,0B0\n1F0,1B0,1F1,1B1") == [
        "rank 0  the same",
        "rank 1  position 2: the first has nothing, the second 1F1",
        "        only in the second: 1F1, 1B1",
    ]


def test_many_moves_are_cut_short() -> None:
    lines = moves("0F0,0F1,0F2,0F3,0F4,0F5", "0F5,0F4,0F3,0F2,0F1,0F0")
    assert lines[1].endswith("and 1 more")
    assert lines[1].count(" to ") == 4


def test_halves_are_compared_with_whole_backwards() -> None:
    assert moves("0F0,0F1,0B0,0B1", "0F0,0F1,0I0,0W0,0I1,0W1") == [
        "other splits backwards into I and W: I is matched with the B of one, W is ignored.",
        "Both run the same order on every rank.",
    ]


def test_other_placements_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "diff", "1f1b", "zb-v")
    assert "The stages are placed differently, so the rows are not compared:" in shown
    assert "zb-v: stages on ranks 0 1 2 3 3 2 1 0" in shown


def test_measures_stand_side_by_side_and_both_are_drawn_on_one_scale(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "diff", "1f1b", "gpipe", "--transfer", 0.1)
    rows = {line.split("  ")[0]: line.split() for line in shown.splitlines()}
    assert rows["makespan"] == ["makespan", "34.6", "33.6", "-1", "-2.9%"]
    assert rows["transfers"] == ["transfers", "48", "48", "same"]
    assert rows["peak activations"][-4:] == ["4", "8", "+4", "+100.0%"]
    assert "first: 1f1b, 4 ranks, 8 microbatches" in shown
    assert "second: gpipe, 4 ranks, 8 microbatches" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_plan_is_priced_with_what_was_measured(capsys: pytest.CaptureFixture[str], measured: Path) -> None:
    shown = out(capsys, "diff", "1f1b", measured)
    assert "Both run the same order on every rank." in shown
    assert "planned / measured: 1.000\n" in shown
    assert "planned: 1f1b, 2 ranks, 4 microbatches" in shown
    assert "measured: 1f1b, 2 ranks, 4 microbatches" in shown
    assert shown.count("makespan 20 ms") == 2
    other = out(capsys, "diff", "gpipe", measured)
    assert "rank 0  position 2: the first has 0F2, the second 0B0" in other
    given = out(capsys, "diff", "1f1b", measured, "--forward", 1)
    assert "planned / measured: 1.000" not in given


def test_files_give_the_sizes_of_names(capsys: pytest.CaptureFixture[str], csv: Path) -> None:
    assert "second: 1f1b, 2 ranks, 2 microbatches" in out(capsys, "diff", csv, "1f1b")
    assert "first: 1f1b, 2 ranks, 5 microbatches" in out(capsys, "diff", "1f1b", csv, "--microbatches", 5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("zb-v {measured}", "costs measured on 2 stages do not fit 4: give costs, as in --forward 1"),
        ("{measured} {measured} --forward 2", "--forward is for schedules; a timeline has its own times"),
        ("{measured} {measured} --ranks 2", "--ranks is for named schedules; "),
        ("1f1b missing.json", "missing.json: No such file or directory"),
        ("1f1b", "the following arguments are required: B (see pipeflow diff --help)"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    capsys: pytest.CaptureFixture[str], measured: Path, argv: str, message: str
) -> None:
    assert error(capsys, "diff", *argv.format(measured=measured).split()).startswith(message)


def test_a_measured_timeline_is_drawn_simulated_verified_and_exported(
    capsys: pytest.CaptureFixture[str], measured: Path
) -> None:
    assert "makespan 20 ms" in out(capsys, "draw", measured)
    shown = out(capsys, "simulate", measured)
    assert shown.startswith("A step takes 20 ms; ")
    assert re.search(r"^idle by rank      \d+ \d+ ms$", shown, re.MULTILINE)
    assert out(capsys, "simulate", measured, "--unit", "us").splitlines()[1] == "makespan          20000 us"
    assert out(capsys, "verify", measured) == "1f1b is sound: 2 ranks, 2 stages, 4 microbatches\n"
    assert out(capsys, "export", measured, "--csv", "-") == make_schedule("1f1b", ranks=2, microbatches=4).to_csv()
    for option in ("--forward", "--microbatches", "--ranks"):
        assert error(capsys, "draw", measured, option, 2).startswith(
            (f"{option} is for", f"{measured}: {option} is for")
        )


def test_a_timeline_of_an_unsound_schedule_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    path.write_text('{"paths": [[0]], "rows": [[["0F0", 0, 1], ["0F1", 1, 2], ["0B0", 2, 3]]]}', encoding="utf-8")
    assert error(capsys, "draw", path).startswith(f"{path} is unsound, 1 violation, the first: rank 0: ")


def test_a_plan_reduces_where_what_was_measured_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4).with_reductions()
    path = tmp_path / "reduced.json"
    path.write_text(simulate(schedule, CostModel.even(schedule.placement, reduce=3)).to_json(), encoding="utf-8")
    assert out(capsys, "verify", path).startswith("1f1b is sound")
    shown = out(capsys, "diff", "1f1b", path)
    assert "Both run the same order on every rank." in shown
    assert "planned / measured: 1.000" in shown
    assert shown.count("reductions 3, exposed 3") == 2
    plain = out(capsys, "diff", "1f1b", "1f1b", "--ranks", 2, "--microbatches", 4)
    assert "reductions" not in plain
