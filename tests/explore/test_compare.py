"""All schedules under the costs of a link, and how those that stand side by side differ, without a browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeflow.core.analysis.difference import moved_actions
from pipeflow.core.analysis.measured_step import measured_costs
from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.core.errors import UsageError
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES, make_schedule
from pipeflow.schedules.registry import COMPARED
from pipeflow.tools.explore.answers import code, file
from pipeflow.tools.explore.fields import title
from pipeflow.tools.explore.state import State
from pipeflow.tools.explore.views import Turns, compare, plan
from tests.cli.run import out

SIZE = {"ranks": "4", "microbatches": "6"}


def opened(name: str, text: str, **fields: str) -> dict[str, str]:
    """The fields of a link that shows a file beside 1F1B."""
    return {"schedule": f"1f1b,file:{name}", "files": json.dumps({name: text}), **fields}


def step(name: str = "1f1b", ranks: int = 2) -> Timeline:
    """A step that was slower on its second stage."""
    schedule = make_schedule(name, ranks=ranks, microbatches=4)
    stages = schedule.placement.num_stages
    forward = (0.001, 0.002, *[0.001] * (stages - 2))
    return simulate(schedule, CostModel(forward, (0.001,) * stages, (0.001,) * stages, latency=0.0005))


@pytest.mark.parametrize(("given", "costs"), [([], {}), (["--transfer", "0.25"], {"latency": "0.25"})])
def test_the_plot_has_the_measures_of_the_command(
    given: list[str], costs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[str, Any] = json.loads(out(capsys, "compare", "--ranks", 4, "--microbatches", 6, *given, "--json"))
    answer = compare({**SIZE, **costs, "schedule": "zb-auto"})["measures"]
    assert list(answer) == list(COMPARED)
    for name, measures in told["schedules"].items():
        assert answer[name]["makespan"] == measures["makespan"]
        assert answer[name]["bubble"] == measures["makespan_bubble_ratio"]
        assert (answer[name]["activations"], answer[name]["bytes"]) == (measures["peak_activations"], None)


def test_memory_is_in_bytes_where_costs_have_them() -> None:
    answer = compare({**SIZE, "saved_bytes": "1024"})
    assert answer["measures"]["1f1b"]["said"].endswith("peak memory 4 KiB")
    assert "Bubble against peak memory" in answer["plot"]


def test_a_schedule_that_cannot_be_made_is_listed_with_its_reason() -> None:
    answer = compare({"ranks": "3", "microbatches": "4"})
    assert "chimera" not in answer["measures"]
    assert any("chimera" in note and "even" in note for note in answer["notes"])


def test_a_search_that_is_not_shown_ends_early_and_that_is_said() -> None:
    costs = {**SIZE, "latency": "0.3"}
    short, whole = compare(costs), compare({**costs, "schedule": "zb-auto"})
    assert any(note.startswith("zb-auto: the best of 20 orders") for note in short["notes"])
    assert not whole["notes"]
    assert short["measures"]["zb-auto"]["makespan"] >= whole["measures"]["zb-auto"]["makespan"]


def test_what_is_shown_is_marked_and_in_the_plot() -> None:
    answer = compare({**SIZE, "schedule": "1f1b,interleaved-1f1b:chunks=4"})
    assert answer["plot"].count("marked") >= 2
    assert 'data-name="interleaved-1f1b:chunks=4"' in answer["plot"]


def test_a_name_may_have_options_of_its_own() -> None:
    answer = plan({**SIZE, "schedule": "interleaved-1f1b,interleaved-1f1b:chunks=4,interleaved-1f1b:", "chunks": "3"})
    chunks = [len(each["rows"][0]["chunks"]) for each in answer["data"]["timelines"]]
    assert chunks == [3, 4, 2]
    assert "interleaved-1f1b chunks=4, 4 ranks" in answer["charts"]
    assert answer["own"][0] == "interleaved-1f1b:chunks=3"
    assert title("interleaved-1f1b:") == "interleaved-1f1b"


def test_the_actions_that_moved_are_told_per_rank() -> None:
    first = Schedule.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2")
    other = Schedule.from_csv("0F0,0I0,0F1,0F2,0I1,0I2,0W0,0W1,0W2\n1F0,1B0,1F1,1B1,1F2,1B2")
    moved = moved_actions(first, other)
    assert moved is not None
    assert [sorted(map(str, rank)) for rank in moved] == [["0I0"], []]
    assert moved_actions(first, make_schedule("zb-v", ranks=2, microbatches=3)) is None


def test_a_plan_says_how_the_others_differ_from_the_first() -> None:
    answer = plan({**SIZE, "schedule": "1f1b,gpipe,zb-v"})
    gpipe = make_schedule("gpipe", ranks=4, microbatches=6)
    moved = moved_actions(make_schedule("1f1b", ranks=4, microbatches=6), gpipe)
    assert moved is not None
    assert [set(rank.split()) for rank in answer["moved"][1]] == [set(map(str, rank)) for rank in moved]
    assert (answer["moved"][0], answer["moved"][2]) == (None, None)
    assert "stages are placed differently" in answer["differences"]
    assert "6 (+2, +50.0%)" in answer["differences"]  # peak activations
    assert not plan(SIZE)["differences"]


def test_a_measured_step_prices_the_plan_beside_it() -> None:
    measured = step()
    state = State.of(opened("run.json", measured.to_json(), ranks="2", microbatches="4"))
    planned = simulate(make_schedule("1f1b", ranks=2, microbatches=4), measured_costs(measured))
    assert state.timeline("1f1b") == planned
    assert state.timeline("file:run.json").rows == measured.rows
    given = State.of(opened("run.json", measured.to_json(), ranks="2", microbatches="4", forward="1"))
    assert given.timeline("1f1b").makespan == 15


def test_measured_costs_are_divided_by_depth_for_another_number_of_stages() -> None:
    measured = step("interleaved-1f1b")
    costs = measured_costs(measured)
    state = State.of(opened("run.json", measured.to_json(), ranks="2", microbatches="4"))
    coarse = state.prices.cost_model(make_schedule("1f1b", ranks=2, microbatches=1).placement)
    assert coarse.forward == pytest.approx([sum(costs.forward[:2]), sum(costs.forward[2:])])


def test_reductions_of_a_file_are_those_of_the_schedules_beside_it() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4).with_reductions()
    measured = simulate(schedule, CostModel.even(schedule.placement, reduce=2))
    state = State.of(opened("run.json", measured.to_json(), ranks="2", microbatches="4"))
    assert state.timeline("1f1b").makespan == measured.makespan


def test_a_file_says_its_size() -> None:
    text = make_schedule("zb-v", ranks=3, microbatches=5).to_csv()
    asked = {"schedule": "file:mine.csv", "files": json.dumps({"mine.csv": text})}
    assert file(asked) == {"ranks": 3, "microbatches": 5, "measured": False, "problem": ""}
    assert (
        compare(opened("mine.csv", text, ranks="3", microbatches="5"))["measures"]["file:mine.csv"]["activations"] > 0
    )


def test_an_unsound_table_is_for_the_reader_to_mend() -> None:
    unsound = opened("mine.csv", "0B0,0F0")
    told = file({**unsound, "schedule": "file:mine.csv"})
    assert told["problem"].startswith("mine.csv is not a sound schedule: rank 0")
    with pytest.raises(UsageError, match="not a sound schedule"):
        plan(unsound)
    ran = '{"paths": [[0]], "rows": [[["0B0", 0, 1], ["0F0", 1, 2]]]}'
    with pytest.raises(UsageError, match="not a sound schedule"):
        file({**opened("run.json", ran), "schedule": "file:run.json"})


@pytest.mark.parametrize("rows", ["0F0 0F1\n1B0", "", "0F0"])
def test_the_readers_own_schedule_is_compared_also_if_it_cannot_run(rows: str) -> None:
    answer = plan({"schedule": "1f1b,custom", "ranks": "2", "rows": rows, "placement": "0.1"})
    assert "Compared with 1f1b" in answer["differences"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (opened("run.json", "{"), "run.json: this is not JSON"),
        (opened("run.json", '{"rows": 3}'), "run.json: this is not a timeline"),
        (opened("mine.csv", "0F0,0G0"), "mine.csv: line 1 .rank 0., cell 2"),
        ({"schedule": "file:run.json"}, "run.json is not in this tab: open the file again"),
        ({"schedule": "file:run.json", "files": "[1]"}, "files must be a JSON object"),
        ({"schedule": "file:run.json", "files": '{"run.json": 3}'}, "files must be a JSON object"),
        ({"schedule": "file:<b>"}, "is not the name of a file"),
        ({"schedule": "1f1b:chunks=4"}, "'1f1b' does not take 'chunks'"),
        ({"schedule": "interleaved-1f1b:cost=4"}, "does not take 'cost'"),
        ({"schedule": "interleaved-1f1b:chunks=x"}, "chunks must be a number"),
        ({"schedule": "interleaved-1f1b:chunks=90000", "ranks": "8"}, "too large for the page"),
        ({"schedule": ",".join(SCHEDULES)}, "at most 8 schedules"),
        ({"width": "10"}, "width must be a whole number of at least 280"),
    ],
)
def test_a_wrong_field_is_one_clear_error(fields: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        State.of(fields)


def test_who_waits_goes_on_when_nobody_goes_first() -> None:
    turns = Turns()
    with turns.first(), turns.first():
        assert not turns.free
    assert turns.free
    turns.wait()


def test_code_makes_a_schedule_with_its_own_options_or_from_a_file() -> None:
    told = code({**SIZE, "schedule": "interleaved-1f1b:chunks=4"})
    assert "'interleaved-1f1b', ranks=4, microbatches=6, chunks=4" in told["python"]
    assert told["command"] == "pipeflow draw interleaved-1f1b --ranks 4 --microbatches 6 --chunks 4"
    text = make_schedule("zb-h1", ranks=2, microbatches=3).to_csv()
    made: dict[str, Any] = {}
    exec(code({**opened("mine.csv", text), "schedule": "file:mine.csv"})["python"], made)
    assert made["timeline"] == simulate(Schedule.from_csv(text, name="mine.csv"))
    with pytest.raises(UsageError, match="no code for a measured timeline"):
        code({**opened("run.json", step().to_json()), "schedule": "file:run.json"})
