"""What is exported makes the same timeline again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from pipeflow.core.errors import UsageError
from pipeflow.core.timeline import Timeline
from pipeflow.draw import svg as drawn
from pipeflow.schedules import SCHEDULES, options_of
from pipeflow.schedules.registry import family_options
from pipeflow.tools.cli import main
from pipeflow.tools.explore.answers import code, csv, json, svg
from pipeflow.tools.explore.state import State

COSTS: dict[str, dict[str, str]] = {
    "unit": {},
    "even": {"forward": "2", "backward_weight": "0.1", "latency": "0.25", "overlap": "0.5"},
    "reduced": {"reduce": "1.5", "optimizer": "0.5", "saved_bytes": "3", "deferred_bytes": "1e-5"},
    "deep": {"factors": "1,1,1,1.7", "latency": "0.3"},
    "bytes": {"activation_bytes": "6", "bandwidth": "7", "reduce": "2", "factors": "3"},
    "model": {"model": "gpt3-175b", "tensor": "8", "data": "2", "devices_per_node": "8"},
}
SIZES = ("saved_bytes", "deferred_bytes")
OPTIONS = {
    "bytes_cap": "100",
    "chunks": "3",
    "extra_warmup": "2",
    "group": "4",
    "kinds": "recompute",
    "memory_cap": "5",
    "objective": "span",
    "slices": "2",
    "waves": "2",
}


def evaluated(text: str) -> Timeline:
    """The timeline that exported Python makes."""
    names: dict[str, Any] = {}
    exec(text, names)
    found = names["timeline"]
    assert isinstance(found, Timeline)
    return found


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_python_makes_the_same_timeline(name: str, costs: str) -> None:
    fields = {"schedule": name, "ranks": "4", "microbatches": "8", **COSTS[costs]}
    answer = code(fields)
    assert evaluated(answer["python"]) == State.of(fields).timeline(name)
    assert (answer["command"] is None) == (costs in ("deep", "bytes", "model"))


def test_every_option_has_a_value_here() -> None:
    assert set(OPTIONS) == set(family_options())


@pytest.mark.parametrize(
    "given",
    [
        {"recompute_stages": "0,2"},
        {"unshard_stages": "0-1", "unshard": "2"},
        {"offload_stages": "all", "offload": "0.5"},
    ],
)
def test_stages_are_in_the_code(given: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"schedule": "gpipe", **given}
    answer, made = code(fields), State.of(fields).timeline("gpipe")
    assert evaluated(answer["python"]) == made
    assert main([*shlex.split(answer["command"])[1:], "--svg", "-"]) == 0
    assert capsys.readouterr().out == drawn(made)


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in SCHEDULES for option in options_of(name)])
def test_options_are_in_the_code(name: str, option: str) -> None:
    if option == "cost":
        return
    fields = {"schedule": name, option: OPTIONS[option], "saved_bytes": "4"}
    answer = code(fields)
    assert evaluated(answer["python"]) == State.of(fields).timeline(name)
    assert f"--{option.replace('_', '-')} {OPTIONS[option]}" in answer["command"]


def test_python_is_short_where_it_can_be() -> None:
    assert code({"schedule": "zb-v", "ranks": "8", "microbatches": "32", "latency": "0.1"})["python"] == (
        "import pipeflow\n\n"
        "schedule = pipeflow.make_schedule('zb-v', ranks=8, microbatches=32)\n"
        "cost = pipeflow.CostModel.even(schedule.placement, transfer=0.1)\n"
        "timeline = pipeflow.simulate(schedule, cost)\n"
    )


@pytest.mark.parametrize(
    "own",
    [
        {"rows": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"},
        {"rows": "0F0 1F0 1B0 0B0"},
        {"rows": "0F0,1F0,1B0,0B0", "placement": "0.0"},
        {"rows": "0F0 1F1 1B1 0B0\n1F0 0F1 1B0 0B1", "placement": "0.1_1.0", "rows_microbatches": "2"},
    ],
)
@pytest.mark.parametrize("costs", ["unit", "reduced", "deep"])
def test_python_of_the_own_schedule(own: dict[str, str], costs: str) -> None:
    fields = {"schedule": "custom", **own, **COSTS[costs]}
    answer = code(fields)
    assert evaluated(answer["python"]) == State.of(fields).timeline("custom")
    assert answer["command"] is None


def test_a_schedule_without_a_table_has_no_python() -> None:
    with pytest.raises(UsageError, match="each rank needs an action"):
        code({"schedule": "custom", "rows": "0F0", "placement": "0.1"})


@pytest.mark.some(19)
@pytest.mark.parametrize("costs", ["unit", "even", "reduced"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_command_draws_the_same_timeline(
    name: str, costs: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"schedule": name, **COSTS[costs]}
    words = shlex.split(code(fields)["command"])
    assert words[:2] == ["pipeflow", "draw"]
    assert main([*words[1:], "--svg", "-"]) == 0
    assert capsys.readouterr().out == drawn(State.of(fields).timeline(name)) == svg(fields)["text"]


@pytest.mark.parametrize("costs", ["unit", "reduced"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_is_that_of_the_command_and_the_times_read_back(
    name: str, costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"schedule": name, **COSTS[costs]}
    # export refuses costs on which the order does not depend
    read = {field: fields[field] for field in fields if "cost" in options_of(name) or field not in SIZES}
    words = shlex.split(code(read)["command"])[2:]
    assert main(["export", *words, "--csv", "-"]) == 0
    assert csv(fields)["text"] == capsys.readouterr().out
    assert Timeline.from_json(json(fields)["text"]) == State.of(fields).timeline(name)


def test_several_schedules_are_exported_one_by_one() -> None:
    for answer in (csv, json, svg, code):
        with pytest.raises(UsageError, match="one schedule can be exported at a time, got 1f1b, zb-v"):
            answer({"schedule": "1f1b,zb-v"})
