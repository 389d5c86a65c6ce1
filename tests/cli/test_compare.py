from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeflow.core.analysis.lowering import lower
from pipeflow.core.analysis.measured_step import measured_costs
from pipeflow.core.analysis.measures import Measures
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel, read_costs
from pipeflow.core.program import Send
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.schedules.registry import COMPARED
from pipeflow.tools.cli import main
from tests.cli.run import error, out


def compared(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(out(capsys, "compare", *argv, "--json"))
    return read


def test_every_schedule_is_compared_or_its_reason_said(capsys: pytest.CaptureFixture[str]) -> None:
    read = compared(capsys, "--ranks", 3, "--microbatches", 5)
    assert sorted([*read["schedules"], *read["refused"]]) == sorted(COMPARED)
    makespans = [measures["makespan"] for measures in read["schedules"].values()]
    assert makespans == sorted(makespans)
    table = out(capsys, "compare", "--ranks", 3, "--microbatches", 5)
    assert all(name in table for name in COMPARED)
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_are_the_values_that_the_programs_send(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=6)
    sent = sum(isinstance(step, Send) for program in lower(schedule) for step in program.instructions)
    assert Measures.of(schedule, simulate(schedule)).transfers == sent


def test_both_bubbles_are_those_of_their_measure(capsys: pytest.CaptureFixture[str]) -> None:
    measures = compared(capsys, "zb-h2")["schedules"]["zb-h2"]
    assert measures["bubble_ratio"] == 0
    assert measures["makespan_bubble_ratio"] == pytest.approx(3 / 27)


def test_the_best_of_a_column_is_marked_and_rows_are_sorted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = out(capsys, "compare", "gpipe", "1f1b", "zb-h2", "--sort", "activations").splitlines()
    assert [line.split()[0] for line in lines[4:7]] == ["1f1b", "zb-h2", "gpipe"]
    assert [[word for word in line.split() if word.endswith("*")] for line in lines[4:7]] == [
        ["4*"],
        ["27*", "11.1%*", "0.0%*"],
        [],
    ]
    assert lines[8:10] == ["weight copies: 1 for all schedules", "transfers: 48 for all schedules"]
    by_name = out(capsys, "compare", "gpipe", "1f1b", "--sort", "name").splitlines()
    assert [line.split()[0] for line in by_name[4:6]] == ["1f1b", "gpipe"]


def test_memory_is_compared_in_bytes_where_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    table = out(capsys, "compare", "gpipe", "1f1b", "--saved-bytes", 2**30)
    assert "4 GiB*" in table
    assert "bubble against peak memory" in table


def test_options_are_for_those_that_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    read = compared(capsys, "1f1b", "interleaved-1f1b", "--chunks", 4)["schedules"]
    assert read["interleaved-1f1b"]["transfers"] > 2 * read["1f1b"]["transfers"]
    assert error(capsys, "compare", "gpipe", "zb-h1", "--chunks", 2) == "none of gpipe, zb-h1 takes --chunks"


def test_costs_of_stages_leave_out_those_with_other_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(
        json.dumps({name: [1, 2] for name in ("forward", "backward_input", "backward_weight")}), encoding="utf-8"
    )
    read = compared(capsys, "gpipe", "interleaved-1f1b", "--ranks", 2, "--costs", costs)
    assert list(read["schedules"]) == ["gpipe"]
    assert read["refused"] == {"interleaved-1f1b": f"{costs}: costs are per stage: the file has 2, not 4"}


def test_files_are_compared_with_schedules(capsys: pytest.CaptureFixture[str], csv: Path) -> None:
    read = compared(capsys, csv, "1f1b", "--ranks", 2, "--microbatches", 2)["schedules"]
    assert read[str(csv)]["makespan"] == read["1f1b"]["makespan"] + 0  # the file is 1f1b but for one forward
    csv.write_text("0F0,0B0\n1F0", encoding="utf-8")
    assert error(capsys, "compare", csv).startswith(f"{csv} is unsound, 1 violation")


def test_schedules_beside_a_measured_step_have_its_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    slow = CostModel((0.001, 0.002), (0.001, 0.001), (0.001, 0.001), latency=0.0005, unit="s")
    measured = tmp_path / "measured.json"
    measured.write_text(simulate(schedule, slow).to_json(), encoding="utf-8")
    read = compared(capsys, "gpipe", measured, "1f1b", "zb-auto", "zb-v")
    makespans = {name: found["makespan"] for name, found in read["schedules"].items()}
    assert makespans[str(measured)] == simulate(schedule, slow).makespan
    assert makespans["1f1b"] == pytest.approx(makespans[str(measured)])
    assert makespans["gpipe"] == pytest.approx(simulate(make_schedule("gpipe", ranks=2, microbatches=4), slow).makespan)
    made = make_schedule("zb-auto", ranks=2, microbatches=4, cost=measured_costs(simulate(schedule, slow)))
    assert makespans["zb-auto"] == pytest.approx(simulate(made, slow).makespan)  # searched under these costs
    assert read["refused"] == {"zb-v": "costs measured on 2 stages do not fit 4: give costs, as in --forward 1"}
    given = compared(capsys, measured, "1f1b", "--forward", 2)["schedules"]
    assert given[str(measured)]["makespan"] == simulate(schedule, slow).makespan
    assert given["1f1b"]["makespan"] == simulate(schedule, CostModel.even(schedule.placement, forward=2)).makespan
    assert error(capsys, "compare", measured, "--forward", 2).startswith("--forward is for schedules; a timeline has ")


def test_the_picture_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plane.svg"
    assert out(capsys, "compare", "gpipe", "1f1b", "--svg", path) == ""
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert out(capsys, "compare", "gpipe", "1f1b", "--svg", "-") == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("gpip", "unknown schedule 'gpip'; did you mean 'gpipe'?"),
        ("--ranks 0", "ranks must be an integer of at least 1, got 0"),
        ("--costs missing.json", "missing.json: No such file or directory"),
        ("--json --svg -", "standard output can take one output, not --json and --svg"),
        ("--json --animate -", "standard output can take one output, not --json and --animate"),
        ("--svg - --animate -", "standard output can take one output, not 2"),
    ],
)
def test_what_cannot_be_compared_is_one_line(capsys: pytest.CaptureFixture[str], argv: str, message: str) -> None:
    assert error(capsys, "compare", *argv.split()).endswith(message)


def test_an_unknown_column_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--sort", "colour"]) == 2
    assert "known: name, makespan, bubble, " in capsys.readouterr().err


def test_a_file_of_costs_is_read_once_for_all_schedules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    costs, texts = tmp_path / "costs.json", list[str]()
    per_stage = {name: [1, 1, 1, 2] for name in ("forward", "backward_input", "backward_weight")}
    costs.write_text(json.dumps(per_stage), encoding="utf-8")

    def counted(text: str) -> CostModel:
        texts.append(text)
        return read_costs(text)

    monkeypatch.setattr("pipeflow.tools.cli.requests.read_costs", counted)
    assert len(compared(capsys, "--costs", costs)["schedules"]) > 5
    assert len(texts) == 1
