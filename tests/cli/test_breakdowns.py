"""`pipeflow plan --breakdown`, its picture, and `pipeflow diff` of two plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.run import error, out

PLAN = ["gpt3-1.3b", "--pipeline", 2, "--data", 2, "--device", "a100-40gb"]
SEARCH = ["gpt2-small", "--devices", 4, "--batch", 16, "--device", "a100-40gb", "--top", 2]
BLOCK = "{http://www.w3.org/2000/svg}rect[@class='block']"


def saved(capsys: pytest.CaptureFixture[str], path: Path, *argv: object) -> dict[str, Any]:
    text = out(capsys, "plan", *argv, "--json")
    path.write_text(text, encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_table_says_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "plan", *PLAN, "--breakdown", "--tensor", 2)
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.endswith("#")}
    assert {"products", "attention", "elementwise", "tensor", "bubble", "optimizer"} <= set(rows)
    assert sum(float(row[3].rstrip("%")) for row in rows.values()) == pytest.approx(100, abs=0.5)
    assert "  bubble: waiting for other stages" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "products" not in out(capsys, "plan", *PLAN)


def test_a_picture_has_a_block_for_each_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = saved(capsys, tmp_path / "plan.json", *PLAN)
    drawn = ElementTree.fromstring(out(capsys, "plan", *PLAN, "--breakdown", "--svg", "-"))
    blocks = {each.get("data-name"): float(each.get("width", 0)) + 1 for each in drawn.findall(BLOCK)}
    parts = found["breakdown"]["parts"]
    assert set(blocks) == set(parts)
    assert sum(parts.values()) == pytest.approx(found["step_seconds"])
    for name, seconds in parts.items():
        assert blocks[name] / sum(blocks.values()) == pytest.approx(seconds / found["step_seconds"], abs=0.01)


def test_the_layouts_of_a_search_stand_beside_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = out(capsys, "plan", *SEARCH, "--breakdown", "--svg", tmp_path / "bars.svg")
    assert any(line.split()[:1] == ["products"] and len(line.split()) == 5 for line in shown.splitlines())
    drawn = ElementTree.parse(tmp_path / "bars.svg").getroot()
    assert len([each for each in drawn.findall(BLOCK) if each.get("data-name") == "products"]) == 2


def test_two_plans_stand_side_by_side(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # short names, which leave the columns beside each other
    one, other = Path("one.json"), Path("other.json")
    first = saved(capsys, one, *PLAN)
    second = saved(capsys, other, *PLAN, "--checkpoint", "--zero")
    shown = out(capsys, "diff", one, other)
    rows = {line.split()[0]: line for line in reversed(shown.splitlines()) if line}  # of two of a name, the first
    more = second["step_seconds"] / first["step_seconds"] - 1
    assert rows["step"].endswith(f"{more:+.1%}")
    assert rows["peak"].endswith(f"{second['peak_bytes'] / first['peak_bytes'] - 1:+.1%}")
    assert rows["checkpoint"].endswith("differs")
    assert "same" in rows["attention"]
    assert f"The second step is {more:.1%} longer, most of it by recomputation +" in " ".join(shown.split())
    assert "Both steps take the same time" in out(capsys, "diff", one, one)
    out(capsys, "diff", one, other, "--svg", tmp_path / "bars.svg")
    assert {each.get("data-name") for each in ElementTree.parse(tmp_path / "bars.svg").getroot().findall(BLOCK)} == {
        *first["breakdown"]["parts"],
        *second["breakdown"]["parts"],
    }


def test_the_first_layout_of_a_search_can_be_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = saved(capsys, tmp_path / "search.json", *SEARCH)
    saved(capsys, tmp_path / "plan.json", *PLAN)
    shown = out(capsys, "diff", tmp_path / "search.json", tmp_path / "plan.json")
    assert f"{1e3 * found['layouts'][0]['step_seconds']:.4g} ms" in shown


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plan", *PLAN[:-2], "--breakdown"], "--breakdown tells where seconds go: say on which device"),
        (["plan", *PLAN, "--svg", "x.svg"], "--svg is for a search: give --devices too"),
        (["plan", *PLAN, "--breakdown", "--json", "--svg", "-"], "standard output can take one output"),
        (["diff", "{plan}", "1f1b"], "plan.json is a plan: compare it with another one of pipeflow plan --json"),
        (["diff", "{plan}", "{plan}", "--html", "x.html"], "--html draws schedules, not two plans: use --svg"),
        (["diff", "1f1b", "zb-v", "--svg", "x.svg"], "--svg is for two plans; for schedules there are --html"),
        (["diff", "{plan}", "{bare}"], "bare.json has a plan without seconds: plan it again with --device"),
    ],
)
def test_what_cannot_be_told_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[object], said: str
) -> None:
    paths = {"plan": tmp_path / "plan.json", "bare": tmp_path / "bare.json"}
    saved(capsys, paths["plan"], *PLAN)
    saved(capsys, paths["bare"], *PLAN[:-2])
    assert said in error(capsys, *(str(each).format(**paths) for each in argv))


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": None},
        {"cluster": {"device": None}},
        {"peak_parts": None},
        {"step_seconds": "x"},
        {"breakdown": {"parts": 3}},
        {"layout": 3},
        {"tokens_per_second": None},
        {"layouts": [{"peak_parts": {}, "step_seconds": 1}]},
    ],
)
def test_a_plan_that_lacks_something_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, object]
) -> None:
    plan, changed = tmp_path / "plan.json", tmp_path / "changed.json"
    plan.write_text(out(capsys, "plan", *PLAN, "--json"), encoding="utf-8")
    changed.write_text(json.dumps(json.loads(plan.read_text(encoding="utf-8")) | change), encoding="utf-8")
    assert "is no plan of pipeflow plan --json: it lacks what" in error(capsys, "diff", changed, plan)
