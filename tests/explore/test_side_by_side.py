"""Schedules side by side, the plot of all schedules, and opened files, in a browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from pipeflow.core.analysis.simulation import simulate
from pipeflow.core.cost import CostModel
from pipeflow.schedules import make_schedule
from pipeflow.schedules.registry import COMPARED
from tests.browser import DEADLINE, MARKS
from tests.explore.explorer import Explorer
from tests.traces.recording import ran, record

pytestmark = MARKS

DROP = """
const [files, type] = arguments;
const dataTransfer = new DataTransfer();
for (const [name, text] of Object.entries(files)) dataTransfer.items.add(new File([text], name));
document.body.dispatchEvent(new DragEvent("dragover", {dataTransfer, bubbles: true, cancelable: true}));
document.body.dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true}));
"""
MOVED = """
const {Page} = await import("./page.js");
const {paint} = Page.prototype;
let page = null;
Page.prototype.paint = function () { page = this; paint.call(this); };
window.dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
await new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)));
Page.prototype.paint = paint;
const blocks = page.charts.map((chart) => chart.timeline.rows.flatMap((row) => row.blocks));
arguments[0]([page.marks.differences, blocks.map((row) => row.filter((block) => block.moved).length)]);
"""


def headings(explorer: Explorer) -> list[str]:
    return explorer.texts("#charts h2")


def chips(explorer: Explorer) -> list[str]:
    return [each.split("\n")[0] for each in explorer.texts(".chips li")]


def until(explorer: Explorer, true: Callable[[], bool]) -> None:
    WebDriverWait(explorer.browser, DEADLINE, poll_frequency=0.02).until(lambda _: true())
    explorer.settled()


def measured() -> str:
    """A step of 1F1B as it was kept."""
    schedule = make_schedule("1f1b", ranks=3, microbatches=5)
    return simulate(schedule, CostModel((1.0, 2.0, 1.0), (1.0,) * 3, (1.0,) * 3)).to_json()


def drop(explorer: Explorer, **files: str) -> None:
    explorer.browser.execute_script(DROP, {name.replace("_", "."): text for name, text in files.items()})


def moved(explorer: Explorer) -> tuple[bool, list[int]]:
    """Whether differences are marked, and the number of blocks that are, per timeline."""
    on, numbers = explorer.settled().browser.execute_async_script(f"(async function () {{ {MOVED} }})(...arguments)")
    return bool(on), list(numbers)


@pytest.mark.exhaustive
def test_the_plot_follows_and_a_click_shows_a_schedule(explorer: Explorer) -> None:
    explorer.open(ranks=4, microbatches=6)
    names = [
        each.get_dom_attribute("data-name") for each in explorer.browser.find_elements("css selector", "[data-name]")
    ]
    assert sorted(names) == sorted(COMPARED)
    before = explorer.text("#scatter .plot")
    assert explorer.set("latency", 0.5).text("#scatter .plot") != before
    explorer.find("[data-name='zb-v']").click()
    assert headings(explorer) == ["zb-v, 4 ranks, 2 chunks, 6 microbatches"]
    assert explorer.find("circle.marked").get_dom_attribute("data-names").split(",")[0] == "zb-v"
    mark = explorer.find("[data-name='v-min']")
    ActionChains(explorer.browser).key_down(Keys.SHIFT).click(mark).key_up(Keys.SHIFT).perform()
    assert chips(explorer) == ["zb-v", "v-min"]
    explorer.browser.back()
    assert headings(explorer) == ["zb-v, 4 ranks, 2 chunks, 6 microbatches"]


@pytest.mark.exhaustive
def test_keys_choose_in_the_plot_and_the_focus_stays_there(explorer: Explorer) -> None:
    explorer.open(schedule="v-min", ranks=4, microbatches=6)
    mark = explorer.find("circle[tabindex='0']")
    assert mark.get_dom_attribute("data-names") == "v-min"
    assert mark.accessible_name.startswith("v-min: bubble")
    mark.send_keys(Keys.ARROW_RIGHT)
    chosen = explorer.browser.switch_to.active_element
    name = chosen.get_dom_attribute("data-names").split(",")[0]
    chosen.send_keys(Keys.ENTER)
    assert chips(explorer) == [name]
    explorer.browser.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    explorer.browser.switch_to.active_element.send_keys(Keys.SHIFT + Keys.ENTER)
    assert chips(explorer) == [name, "v-min"]


@pytest.mark.exhaustive
def test_what_cannot_be_made_is_listed(explorer: Explorer) -> None:
    explorer.open(ranks=3)
    assert "chimera" in explorer.text("#scatter ul")
    explorer.open(schedule="chimera").set("ranks", 3)
    assert "chimera" in explorer.text("#scatter ul")  # the plot follows, so that another one can be chosen
    explorer.complaints()
    explorer.find("[data-name='1f1b']").click()
    assert headings(explorer) == ["1f1b, 3 ranks, 8 microbatches"]


def test_schedules_are_added_and_removed_and_differences_marked(explorer: Explorer) -> None:
    explorer.open(schedule="1f1b").find("#add").send_keys("gpipe")
    assert chips(explorer) == ["1f1b", "gpipe"]
    assert "Compared with 1f1b" in explorer.text("#compared")
    on, numbers = moved(explorer)
    assert on
    assert numbers[0] == 0
    assert f"{numbers[1]} of 64" in explorer.text("#compared")
    explorer.find("#differences").click()
    assert explorer.fields["differences"] == "off"
    assert moved(explorer)[0] is False
    explorer.find(".chips button").click()
    assert headings(explorer) == ["gpipe, 4 ranks, 8 microbatches"]
    assert explorer.text("#compared") == ""
    assert not explorer.find("#differences").is_displayed()


@pytest.mark.exhaustive
def test_one_schedule_stands_beside_itself_with_other_options(explorer: Explorer) -> None:
    explorer.open(schedule="interleaved-1f1b").find("#add").send_keys("interleaved-1f1b")
    explorer.set("chunks", 4)
    assert headings(explorer) == [
        "interleaved-1f1b, 4 ranks, 2 chunks, 8 microbatches",
        "interleaved-1f1b, 4 ranks, 4 chunks, 8 microbatches",
    ]


@pytest.mark.exhaustive
def test_the_first_schedule_changes_and_the_others_stay(explorer: Explorer) -> None:
    explorer.open(schedule="1f1b,zb-v").set("schedule", "gpipe")
    assert chips(explorer) == ["gpipe", "zb-v"]


@pytest.mark.exhaustive
def test_a_measured_timeline_stands_beside_the_plan_and_survives_a_reload(explorer: Explorer) -> None:
    explorer.open(schedule="1f1b")
    drop(explorer, run_json=measured())
    until(explorer, lambda: len(chips(explorer)) == 2)
    shown = ["1f1b, 3 ranks, 5 microbatches", "1f1b (run.json), 3 ranks, 5 microbatches"]
    assert headings(explorer) == shown
    assert explorer.browser.title == "1f1b, 1f1b (run.json) - pipeflow explore"
    makespans = explorer.texts(".said span:first-child")
    assert makespans[0] == makespans[1]  # the plan has the measured costs
    assert "measured in run.json" in explorer.text("#priced")
    explorer.browser.refresh()
    assert headings(explorer.settled()) == shown
    assert explorer.set("latency", 1).text(".said") != makespans[0]
    assert explorer.find("#priced").get_property("hidden")
    assert headings(explorer) == shown


@pytest.mark.exhaustive
def test_traces_of_all_ranks_are_dropped_and_their_step_is_shown(explorer: Explorer, tmp_path: Path) -> None:
    step = ran(make_schedule("1f1b", ranks=2, microbatches=4))
    texts = {path.name: path.read_text(encoding="utf-8") for path in record(tmp_path / "traces", step).iterdir()}
    explorer.open(schedule="zb-h1")
    explorer.browser.execute_script(DROP, texts)
    until(explorer, lambda: len(chips(explorer)) == 2)
    assert headings(explorer)[1] == "1f1b (rank0.json), 2 ranks, 4 microbatches"
    assert "measured in rank0.json" in explorer.text("#priced")
    explorer.browser.execute_script(DROP, {"rank1.json": texts["rank1.json"]})
    until(explorer, lambda: "1 of 2 ranks were recorded" in explorer.text("#unopened"))
    explorer.complaints()


@pytest.mark.exhaustive
def test_a_malformed_file_is_one_error_and_loses_nothing(explorer: Explorer, tmp_path: Path) -> None:
    explorer.open(schedule="zb-v", ranks=2)
    before = explorer.fields
    for text in ("{", '{"rows": [], "paths": 3}', "0F0,0X0", '{"a": "<b>"}'):
        path = tmp_path / "bad run.json"
        path.write_text(text, encoding="utf-8")
        explorer.find("[type=file]").send_keys(str(path))
        until(explorer, lambda: not explorer.find("#unopened").get_property("hidden"))
        assert "bad-run.json: " in explorer.text("#unopened")
        assert explorer.fields == before
        assert headings(explorer) == ["zb-v, 2 ranks, 2 chunks, 8 microbatches"]
        explorer.browser.execute_script("document.getElementById('unopened').hidden = true")
    drop(explorer, big_json="[" + "1," * 2_100_000 + "1]")
    until(explorer, lambda: "big.json" in explorer.text("#unopened"))
    assert "at most" in explorer.text("#unopened")
    explorer.complaints()
    assert explorer.set("ranks", 4).find("#unopened").get_property("hidden")


@pytest.mark.exhaustive
def test_a_dropped_table_is_the_readers_own_schedule(explorer: Explorer) -> None:
    explorer.open(schedule="1f1b")
    drop(explorer, mine_csv=make_schedule("zb-h1", ranks=2, microbatches=3).to_csv())
    until(explorer, lambda: len(chips(explorer)) == 2)
    assert headings(explorer) == ["1f1b, 2 ranks, 3 microbatches", "custom (mine.csv), 2 ranks, 3 microbatches"]
    assert explorer.browser.title == "1f1b, custom (mine.csv) - pipeflow explore"
    assert chips(explorer)[1] == "custom (mine.csv)"
    assert explorer.fields["rows"].startswith("0F0,0F1")


@pytest.mark.exhaustive
def test_a_table_too_long_for_a_link_is_kept_in_the_tab(explorer: Explorer) -> None:
    explorer.open(schedule="1f1b")
    drop(explorer, long_csv=make_schedule("gpipe", ranks=16, microbatches=80).to_csv())
    until(explorer, lambda: len(chips(explorer)) == 2)
    assert explorer.fields["schedule"] == "1f1b,file:long.csv"
    assert headings(explorer)[1] == "long.csv, 16 ranks, 80 microbatches"


@pytest.mark.exhaustive
def test_a_link_whose_file_is_elsewhere_says_so(explorer: Explorer) -> None:
    explorer.open(schedule="1f1b").browser.execute_script("location.hash = 'schedule=1f1b,file:gone.json'")
    assert "gone.json is not in this tab" in explorer.text("#problem")
    explorer.complaints()
    explorer.find("[aria-label='Remove gone.json']").click()
    assert headings(explorer) == ["1f1b, 4 ranks, 8 microbatches"]
    assert explorer.find("#problem").get_property("hidden")


@pytest.mark.exhaustive
def test_keys_within_controls_are_theirs(explorer: Explorer) -> None:
    box = explorer.open().find("#field-microbatches")
    box.send_keys(Keys.BACKSPACE, "10", Keys.TAB)
    assert explorer.settled().fields == {"microbatches": "10"}


@pytest.mark.exhaustive
def test_costs_of_actions_that_named_schedules_lack_are_shown_with_a_table(explorer: Explorer) -> None:
    def shown() -> list[bool]:
        return [bool(explorer.find(f"#field-{name}").is_displayed()) for name in ("offload", "saved_bytes")]

    explorer.open(schedule="zb-v").unfold()
    assert shown() == [False, True]
    drop(explorer, again_csv=make_schedule("gpipe", ranks=16, microbatches=80, recompute=True).to_csv())
    until(explorer, lambda: len(chips(explorer)) == 2)
    assert explorer.fields["schedule"] == "zb-v,file:again.csv"
    assert shown() == [True, True]
    explorer.open(schedule="custom", edit=1, rows="0F0 0B0").unfold()
    assert shown() == [True, True]
