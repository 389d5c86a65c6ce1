"""`pipeflow plan --layout`: stages given as a string that Megatron-LM reads, and written as one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeflow.planning.layout_string import LayoutString
from tests.cli.run import error, out

LLAMA = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"  # NVIDIA-NeMo/Megatron-Bridge, pull request 5391


def read(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out(capsys, "plan", *argv, "--json"))
    return found


def test_a_layout_of_several_stages_per_rank_is_interleaved(capsys: pytest.CaptureFixture[str]) -> None:
    found = read(capsys, "llama3-70b", "--pipeline", 8, "--layout", LLAMA)
    assert found["schedule"] == "interleaved-1f1b"
    assert [rank["stages"] for rank in found["ranks"]][3] == [3, 11, 19, 27, 35]
    assert [rank["layers"] for rank in found["ranks"]] == [10, 10, 10, 11, 10, 10, 10, 9]
    assert LayoutString.read(found["layout_string"]) == LayoutString.read(LLAMA)
    assert read(capsys, "tiny", "--layout", "Et*2|tt|tt|ttL") == read(capsys, "tiny")


def test_another_schedule_may_have_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--pipeline", 2, "--layout", "E|t*4|t*3|tL"]
    assert read(capsys, "tiny", *layout, "--schedule", "interleaved-zb")["schedule"] == "interleaved-zb"
    searched = read(capsys, "tiny", "--layout", "E|t*5|t*3|L", "--schedule", "zb-auto", "--microbatches", 4)
    assert [rank["layers"] for rank in searched["ranks"]] == [0, 5, 3, 0]


def test_a_plan_says_its_layout_where_it_is_uneven_or_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    uneven = out(capsys, "plan", "tiny", "--cut", "0,3,0,5")
    assert "\nlayout: E|ttt||t*5L\n" in uneven
    asked = out(capsys, "plan", "tiny", "--cut", "0,3,0,5", "--layout", "")
    assert asked.partition("\nUse it")[0] == uneven.partition("\nUse it")[0]
    assert "layout: " not in out(capsys, "plan", "tiny")
    assert "\nlayout: Ett|tt|tt|ttL\n" in out(capsys, "plan", "tiny", "--layout")
    assert "\nlayout: no string, since zb-v does" in out(capsys, "plan", "tiny", "--schedule", "zb-v", "--layout")
    assert read(capsys, "tiny", "--schedule", "zb-v")["layout_string"] is None


def test_a_search_says_the_layout_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    search = ["tiny", "--devices", 4, "--batch", 16, "--device", "a100-40gb", "--tensor", 1, "--pipeline", 4]
    found = read(capsys, *search)["layouts"]
    assert {each["layout_string"] is None for each in found} == {True, False}
    for each in found:
        if each["layout_string"] is not None:
            sizes = [stage.count("t") for stage in LayoutString.read(each["layout_string"]).stages]
            assert sizes == [end - start for start, end in each["cut"]]
    best = read(capsys, *search, "--top", 1)["layouts"][0]["layout_string"]
    assert f"\nlayout: {best}\n" in out(capsys, "plan", *search, "--top", 1, "--layout")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--layout", "Et*4|t*4L"],
            "the layout has 2 stages, which do not divide among 4 pipeline ranks: use 1, 2 ranks",
        ),
        (["--pipeline", 2, "--layout", "Et*4|t*3L"], "the layout has 7 layers ('t'), but the model has 8"),
        (["--pipeline", 2, "--layout", "Et*4|t*4,m|L"], "the layout has 3 stages, which do not divide among 2"),
        (["--pipeline", 3, "--layout", "Et*4|t*4,m|L"], "plans have MTP layers in the last stage alone: move 'm'"),
        (["--pipeline", 2, "--mtp", 2, "--layout", "Et*4|t*4,mL"], "the layout has 1 MTP layers ('m'), but the model"),
        (["--pipeline", 2, "--layout", "Et*4|t*4L", "--cut", "4,4"], "--layout and --cut both divide the layers"),
        (
            ["--pipeline", 2, "--layout", "Et*4|t*4L", "--schedule", "zb-v"],
            "the layout has 2 stages, but the schedule has 4 on 2 ranks",
        ),
        (
            ["--pipeline", 2, "--layout", "Et*2|tt|tt|ttL", "--schedule", "zb-v"],
            "the layout has 4 stages, each on the rank of its number modulo 2, but the schedule has 4 stages on other",
        ),
        (
            ["--devices", 4, "--batch", 8, "--device", "t4", "--layout", "EL"],
            "--layout is for one layout, not for a search with --devices: cuts are searched, too",
        ),
    ],
)
def test_what_cannot_be_is_said(capsys: pytest.CaptureFixture[str], argv: list[object], message: str) -> None:
    assert error(capsys, "plan", "tiny", *argv).startswith(message)
