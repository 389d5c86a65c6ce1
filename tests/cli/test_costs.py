from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeflow.tools.cli import main
from tests.cli.run import error, out

SOUND: dict[str, Any] = {"forward": [1, 2], "backward_input": [1, 1], "backward_weight": [1, 1]}


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(SOUND), encoding="utf-8")
    return path


def makespan(capsys: pytest.CaptureFixture[str], *argv: object) -> float:
    number: float = json.loads(out(capsys, "simulate", *argv, "--json"))["makespan"]
    return number


def test_costs_per_stage_are_read_from_a_file(capsys: pytest.CaptureFixture[str], costs: Path) -> None:
    sizes = ["gpipe", "--ranks", 2, "--microbatches", 1, "--costs", costs]
    assert makespan(capsys, *sizes) == 1 + 2 + 2 + 2
    costs.write_text(json.dumps(SOUND | {"latency": 0.25, "links": {"0->1": {"latency": 3}}}), encoding="utf-8")
    assert makespan(capsys, *sizes) == 1 + 3 + 2 + 2 + 0.25 + 2
    costs.write_text(json.dumps(SOUND | {"bandwidth": 2, "activation_bytes": [4, 1]}), encoding="utf-8")
    assert makespan(capsys, *sizes) == 7 + 2 * 4 / 2


def test_every_option_is_a_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["1f1b", "--ranks", 2, "--microbatches", 4]
    plain = makespan(capsys, *sizes)
    for option in ("--forward", "--backward-input", "--backward-weight", "--transfer"):
        assert makespan(capsys, *sizes, option, 3) > plain
    paired = tmp_path / "paired.csv"
    paired.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1", encoding="utf-8")
    for name, value in {"--overlap": 1.0, "--exchange": 0.5}.items():
        assert makespan(capsys, paired, name, value) == makespan(capsys, paired) - 1


def test_bytes_are_said_where_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["zb-h1", "--ranks", 2, "--microbatches", 4]
    assert "memory" not in out(capsys, "simulate", *sizes)
    assert "peak memory       2 GiB  1.5 GiB\n" in out(
        capsys, "simulate", *sizes, "--saved-bytes", 2**30, "--deferred-bytes", 2**29
    )
    read = json.loads(out(capsys, "simulate", *sizes, "--saved-bytes", 8, "--json"))
    assert read["peak_bytes"] == [16, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"forwards": [1]}), "'forwards' is not a cost; known: forward, backward_input, "),
        (json.dumps({"forward": [1, 2]}), "backward_input is missing: give a list with one number per stage"),
        (json.dumps(SOUND | {"forward": 1}), "forward must be a list with one number per stage, got 1"),
        (json.dumps(SOUND | {"times": [1, 2]}), "times must be an object with a list per stage for some of F, B, "),
        (json.dumps(SOUND | {"times": {"X": [1, 2]}}), "times must be an object with a list per stage for some of F"),
        (json.dumps(SOUND | {"kept_bytes": {"saved": 1}}), "kept_bytes of saved must be a list with one number per"),
        (
            json.dumps(SOUND | {"forward": [1]}),
            "costs are per stage: backward_input has length 2, forward has length 1",
        ),
        (json.dumps(SOUND | {"forward": [1, "2"]}), "forward of stage 1 must be a number, got '2'"),
        (json.dumps(SOUND | {"forward": [1, -2]}), "forward of stage 1 must be finite and not negative, got -2.0"),
        (
            json.dumps(SOUND | {"saved_bytes": [1]}),
            "costs are per stage: saved_bytes has length 1, forward has length 2",
        ),
        (json.dumps(SOUND | {"latency": -1}), "latency must be finite and not negative, got -1.0"),
        (json.dumps(SOUND | {"latency": [1]}), "latency must be a number, got [1]"),
        (json.dumps(SOUND | {"overlap": 2}), "overlap is a share of the shorter half"),
        (json.dumps(SOUND | {"links": [1]}), "links must be like "),
        (json.dumps(SOUND | {"route_bytes": {"0": 1}}), "route_bytes must be like "),
        (json.dumps(SOUND | {"route_bytes": {"0->1": 1}}), "a route must skip at least one stage"),
        (json.dumps(SOUND | {"links": {"0-1": {}}}), "links: '0-1' must be like "),
        (json.dumps(SOUND | {"links": {"0->1": {"speed": 1}}}), "links: '0->1' must be like "),
        (json.dumps(SOUND | {"links": {"0->1": {"latency": -1}}}), "link 0->1: latency must not be negative"),
        (json.dumps(SOUND | {"links": {"0->1": {"bandwidth": 0}}}), "link 0->1: latency must not be negative and band"),
        ("[1, 2]", "costs must be an object with some of forward, "),
        ("1F0,", "this is not JSON: "),
    ],
)
def test_what_is_wrong_with_a_file_of_costs(
    capsys: pytest.CaptureFixture[str], costs: Path, text: str, message: str
) -> None:
    costs.write_text(text, encoding="utf-8")
    said = error(capsys, "simulate", "1f1b", "--ranks", 2, "--costs", costs)
    assert said.startswith(f"{costs}: {message}")


def test_costs_must_fit_the_schedule_and_be_given_once(capsys: pytest.CaptureFixture[str], costs: Path) -> None:
    said = error(capsys, "draw", "1f1b", "--costs", costs)
    assert said == f"{costs}: costs are per stage: the file has 2, not 4"
    said = error(capsys, "draw", "1f1b", "--costs", costs, "--transfer", 1)
    assert said == "--transfer and --costs are two ways to give costs: choose one"
    missing = costs.with_name("cost.json")
    assert error(capsys, "draw", "1f1b", "--costs", missing).endswith(f"did you mean {costs}?")


def test_a_price_of_reductions_plans_them(capsys: pytest.CaptureFixture[str], costs: Path) -> None:
    sizes = ["1f1b", "--ranks", 2, "--microbatches", 4]
    assert makespan(capsys, *sizes, "--reduce", 2.5) == makespan(capsys, *sizes) + 2.5
    plain, read = (json.loads(out(capsys, "simulate", *sizes, *more, "--json")) for more in ([], ["--reduce", 2]))
    assert set(read) == {*plain, "exposed"}
    assert read["exposed"] == read["critical_path"]["reductions"] == 2
    assert "reductions        2, exposed 2\n" in out(capsys, "simulate", *sizes, "--reduce", 2)
    assert "R3" in out(capsys, "draw", *sizes, "--reduce", 2)
    assert json.loads(out(capsys, "compare", *sizes, "--reduce", 2, "--json"))["schedules"]["1f1b"]["makespan"] == 17
    costs.write_text(json.dumps(SOUND | {"reduce": [1, 3]}), encoding="utf-8")
    priced = json.loads(out(capsys, "simulate", *sizes, "--costs", costs, "--json"))
    assert priced["exposed"] == 1


def test_tables_hold_reductions_as_torch_writes_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "reduced.csv"
    sizes = ["zb-v", "--ranks", 2, "--microbatches", 2]
    out(capsys, "export", *sizes, "--reduce", 0, "--csv", table)
    assert table.read_text(encoding="utf-8").count("REDUCE_GRAD") == 4
    assert "is sound" in out(capsys, "verify", table, "--placement", "vee")
    vee = [table, "--placement", "vee", "--reduce", 2]
    assert makespan(capsys, *vee) == makespan(capsys, *sizes, "--reduce", 2) > makespan(capsys, *sizes)
    assert out(capsys, "export", table, "--placement", "vee", "--forward-only", "--csv", "-").count("REDUCE") == 0
    table.write_text(table.read_text(encoding="utf-8").replace(",0REDUCE_GRAD", ""), encoding="utf-8")
    assert main(["verify", str(table), "--placement", "vee"]) == 1
    wanted = "expected 0R1 after 0W1, since others have one"
    assert capsys.readouterr().out.endswith(f"\nrank 0: stage 0 has no gradient reduction; {wanted}\n")


def test_steps_of_the_optimizer_are_drawn_and_take_their_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes, path = ["1f1b", "--ranks", 2, "--microbatches", 3], tmp_path / "costs.json"
    path.write_text(json.dumps(SOUND | {"forward": [1, 1], "optimizer": [2, 5]}), encoding="utf-8")
    assert makespan(capsys, *sizes) == 12
    assert makespan(capsys, *sizes, "--optimizer", 2) == 12 + 2
    assert makespan(capsys, *sizes, "--costs", path) == 10 + 5  # the last rank, which is done sooner
    assert "S optimizer step" in out(capsys, "draw", *sizes, "--costs", path)
