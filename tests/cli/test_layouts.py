from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.run import error, out

SMALL = ["gpt2-small", "--devices", 4, "--batch", 16, "--device", "a100-40gb"]


def read(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out(capsys, "plan", *argv, "--json"))
    return found


def test_layouts_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    found = read(capsys, *SMALL, "--memory", "4GiB")
    first, *others = found["layouts"]
    assert (found["recommended"]["place"], found["gain_of_fastest"]) == (1, 0.0)
    assert (found["memory_bytes"], found["devices"], found["batch"]) == (4 * 2**30, 4, 16)
    assert len(others) == 4
    for each in found["layouts"]:
        assert each["peak_bytes"] == max(each["rank_bytes"]) <= 4 * 2**30
        assert sum(each["step_parts"].values()) == pytest.approx(each["step_seconds"])
        assert each["tokens_per_second"] == pytest.approx(16 * 1024 / each["step_seconds"])
        assert each["tensor"] * each["pipeline"] * each["data"] == 4
        assert sum(each["more_than_first"].values()) == pytest.approx(each["step_seconds"] - first["step_seconds"])
    same = ["--microbatches", first["microbatches"], "--microbatch-size", first["microbatch_size"]]
    sizes = ["--tensor", first["tensor"], "--pipeline", first["pipeline"], "--data", first["data"]]
    assert first["pipeline"] == 1  # so the command for one layout needs no cut
    same += ["--zero", first["zero"], "--attention", first["attention"], *["--overlap"] * first["overlap"]]
    same += ["--sequence-parallel"] * first["sequence_parallel"]
    alone = read(capsys, "gpt2-small", "--device", "a100-40gb", *same, *sizes)
    assert alone["step_seconds"] == pytest.approx(first["step_seconds"])
    assert alone["peak_bytes"] == pytest.approx(first["peak_bytes"])


@pytest.mark.parametrize("fixed", [[], ["--tensor", 1, "--pipeline", 4], ["--checkpoint", "--top", 2]])
def test_layouts_for_people(capsys: pytest.CaptureFixture[str], fixed: list[object]) -> None:
    shown = out(capsys, "plan", *SMALL, *fixed)
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "4 devices a100-40gb, at most 37.6 GiB on each" in shown
    rows = [line for line in shown.splitlines() if line.endswith(" GiB")]
    assert [row.split()[0].rstrip("*") for row in rows] == [
        str(place) for place in range(1, 3 if "--top" in fixed else 6)
    ]
    assert ("schedules." in shown) == ("--pipeline" not in fixed)
    assert all(" full " in row for row in rows) == ("--checkpoint" in fixed)
    times = [float(row.partition(" ms ")[0].split()[-1]) for row in rows]
    assert times == sorted(times)
    tied = sum(time <= times[0] * 1.02 for time in times)
    assert (f"Times of 1-{tied} are within 2%, which is a tie." in shown) == (tied > 1)
    assert "\n2 +" in shown or "\n2 ties with 1" in shown


@pytest.mark.slow
def test_all_that_is_told_of_a_search_is_of_the_recommended_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """1F1B is listed beside the fastest, which has the same sizes, and is a tie."""
    words = ["gpt2-xl", "--devices", 4, "--batch", 256, "--device", "a100-40gb", "--pipeline", 2]
    words += ["--microbatch-size", 1, "--memory", "12GiB", "--top", 1]
    found = read(capsys, *words)
    best, (first, second) = found["recommended"], found["layouts"]
    assert (best["place"], best["schedule"], best["step_seconds"]) == (2, "1f1b", second["step_seconds"])
    assert first["schedule"] != "1f1b"
    assert found["gain_of_fastest"] == pytest.approx(1 - first["step_seconds"] / second["step_seconds"])
    assert 0 < found["gain_of_fastest"] < found["tie"]
    shown = out(capsys, "plan", *words, "--layout")
    said = " ".join(shown.split())
    assert said.startswith("The recommended layout takes ")
    assert " a step: 1f1b, tensor 1, pipeline 2, data 2. The fastest takes " in said
    assert f", {found['gain_of_fastest']:.1%} less: {first['schedule']}" in said
    assert "2* is recommended: " in said
    assert "Each row but 2* has other sizes" in said
    assert 'make_schedule("1f1b"' in shown.partition("\nUse it\n")[2]
    assert "2*: 1f1b 1x2x2" in out(capsys, "plan", *words, "--svg", "-")


def test_a_search_says_that_the_replicas_of_a_node_divide_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["gpt3-1.3b", "--devices", 16, "--batch", 16, "--device", "a100-80gb", "--network-bandwidth", "5e9"]
    slow += ["--zero", 3, "--tensor", 1, "--pipeline", 1]
    said = " ".join(out(capsys, "plan", *slow).split())
    assert " none 3 over 8 " in said
    assert "3 over 8: the replicas of a node divide the weights (--shard-ranks); others have copies." in said
    assert "apply torch's fully_shard to the stages, over a mesh of 2 x 8" in said
    assert [each["shard_ranks"] for each in read(capsys, *slow)["layouts"]] == [8]
    said = " ".join(out(capsys, "plan", *slow, "--shard-ranks", 16).split())
    assert "over 8" not in said
    assert "the replicas of a node" not in said


def test_fewer_devices_may_be_faster(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["tiny", "--devices", 16, "--batch", 16, "--device", "a100-40gb", "--network-bandwidth", "1e7", "--top", 1]
    found = read(capsys, *slow)
    fewer = found["fewer_devices"]
    assert fewer["devices"] <= 8
    assert fewer["step_seconds"] < found["recommended"]["step_seconds"]
    assert f"Fewer devices are faster here: {fewer['devices']} take" in out(capsys, "plan", *slow)
    assert read(capsys, *SMALL)["fewer_devices"] is None


@pytest.mark.slow
def test_programs_in_fp16_may_recompute_scores_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has room for the widest names."""
    large = ["gpt3-13b", "--devices", 16, "--batch", 64, "--device", "a100-40gb", "--precision", "fp16"]
    shown = out(capsys, "plan", *large, "--schedule", "interleaved-zb", "--tensor", 2, "--zero", 1)
    rows = [line for line in shown.splitlines() if line.endswith(" GiB")]
    assert len(rows) == 3
    assert any(" scores " in row for row in rows)


def test_a_plot_of_time_against_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "layouts.svg"
    out(capsys, "plan", *SMALL, "--svg", path)
    written = path.read_text(encoding="utf-8")
    ElementTree.fromstring(written)
    assert "memory of the fullest device" in written
    assert "1*: no pipeline 1x1x4" in written
    assert out(capsys, "plan", *SMALL, "--svg", "-") == written


@pytest.mark.parametrize(("text", "size"), [("40GiB", 40 * 2**30), ("40 gb", 40e9), ("4e10", 4e10), ("1.5TB", 1.5e12)])
def test_sizes_of_memory(capsys: pytest.CaptureFixture[str], text: str, size: float) -> None:
    assert read(capsys, *SMALL, "--top", 1, "--tensor", 1, "--pipeline", 1, "--memory", text)["memory_bytes"] == size


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["gpt2-small", "--devices", 4, "--batch", 16], "say which device, with --device or --cluster"),
        (["gpt2-small", "--devices", 4, "--device", "t4"], "with --batch"),
        (["gpt2-small", "--batch", 4, "--svg", "x.svg"], "--batch, --svg are for a search: give --devices too"),
        ([*SMALL, "--microbatches", 4], "--microbatches is for one layout"),
        ([*SMALL, "--data", 4], "--data is for one layout"),
        ([*SMALL, "--chunks", 4], "--chunks: a search with --devices chooses the options"),
        ([*SMALL, "--memory", 80], "such as 80GiB, 80GB or 80e9, got '80'"),
        ([*SMALL, "--memory", "80 pounds"], "such as 80GiB, 80GB or 80e9"),
        ([*SMALL, "--devices", 10**6], "--devices 1,000,000 is too large for a search, which takes at most 262,144"),
        ([*SMALL, "--top", 0], "--top must be at least 1"),
        ([*SMALL, "--json", "--svg", "-"], "standard output can take one output"),
        ([*SMALL, "--schedule", "1f1c"], "unknown schedule '1f1c'"),
        ([*SMALL[:-1], "b100"], "unknown device 'b100'; did you mean"),
        ([*SMALL, "--cut", "cost"], "--cut is for one layout, not for a search with --devices: cuts are searched, too"),
        ([*SMALL, "--tensor", 3, "--pipeline", 3], "4 devices do not divide into layouts with tensor 3 and pipeline 3"),
        ([*SMALL, "--pipeline", 3], "the nearest number that works is 3; with 4 devices, pipeline 2 or 4 works"),
    ],
)
def test_what_cannot_be_searched_is_refused(capsys: pytest.CaptureFixture[str], argv: list[object], said: str) -> None:
    assert said in error(capsys, "plan", *argv)
