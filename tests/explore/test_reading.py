"""What a reader marks, selects and zooms to on the page, its link, and the measures of a range of time."""

from __future__ import annotations

import re

import pytest
from selenium.webdriver.support.wait import WebDriverWait

from pipeflow.core.analysis.measures import window as ranks_in
from pipeflow.core.errors import UsageError
from pipeflow.schedules import SCHEDULES
from pipeflow.tools.explore.state import State
from pipeflow.tools.explore.views import plan, window
from tests.browser import DEADLINE, MARKS, webdriver
from tests.explore.explorer import Explorer

ActionChains, Keys = webdriver.ActionChains, webdriver.Keys


def cells(tables: str) -> list[str]:
    return re.findall(r"<td>([^<]*)</td>", tables)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_has_every_rank_in_the_range(name: str) -> None:
    fields = {"schedule": name, "from": "5", "to": "11"}
    answer = window(fields)
    ranks = ranks_in(State.of(fields).timeline(name), 5, 11)
    lines = [cells(line) for line in answer["tables"].split("<tr>") if "<td>" in line]
    assert answer["title"] == "Ranks in 5 to 11"
    assert [line[-2] for line in lines[:-1]] == [f"{rank.utilisation:.1%}" for rank in ranks]
    assert [float(line[-3]) for line in lines[:-1]] == pytest.approx([rank.idle for rank in ranks], rel=1e-3, abs=1e-9)
    assert [float(line[-1]) for line in lines] == [rank.peak for rank in ranks] + [max(rank.peak for rank in ranks)]


def test_without_a_range_the_table_is_of_the_whole_step() -> None:
    answer = window({"schedule": "1f1b,zb-v"})
    assert answer["title"] == "Ranks in the whole step"
    assert answer["tables"].count("<table>") == 2
    assert cells(answer["tables"])[:5] == ["8", "16", "9", "72.7%", "4"]


def test_a_range_of_a_model_is_in_the_unit_of_the_page() -> None:
    fields = {"model": "gpt3-175b", "ranks": "8", "tensor": "8", "from": "0.1", "to": "0.2"}
    assert window(fields)["title"] == "Ranks in 0.1 s to 0.2 s"
    assert cells(window(fields)["tables"])[0] == "0.1 s"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"from": "x"}, "from must be a number"),
        ({"from": "5", "to": "4"}, "must end after it begins"),
        ({"follow": "-1"}, "follow must be a whole number of at least 0"),
        ({"path": "yes"}, "path is 1 or left out"),
        ({"colour": "red"}, "colour must be one of kind, chunk, microbatch"),
        ({"memory_cap": "1,2,3"}, "3 numbers for 4 ranks"),
    ],
)
def test_a_wrong_field_is_one_clear_error(fields: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        (plan if "memory_cap" in fields else window)(fields)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_with_its_cap(name: str) -> None:
    made = plan({"schedule": name, "memory_cap": "4"})["data"]["timelines"][0]
    assert {row["cap"]["amount"] for row in made["rows"]} == {4}
    assert made["highest"] >= 4
    in_bytes = plan({"schedule": name, "saved_bytes": "1", "memory_cap": "4"})["data"]["timelines"][0]
    assert [row["cap"] for row in in_bytes["rows"]] == [None] * 4


class TestOnThePage:
    pytestmark = MARKS

    def press(self, explorer: Explorer, *keys: str) -> Explorer:
        for key in keys:
            ActionChains(explorer.browser).send_keys(key).perform()
        return explorer.settled()

    def asked(self, explorer: Explorer) -> int:
        """How often the page asked for timelines."""
        script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        return sum(name.endswith("/plan") for name in explorer.browser.execute_script(script))

    @pytest.mark.exhaustive
    def test_a_link_shows_what_its_sender_saw(self, explorer: Explorer) -> None:
        explorer.open(schedule="1f1b")
        self.press(explorer, "c").find("#colour option:nth-child(3)").click()
        explorer.find("#find").send_keys("stage 1", Keys.ENTER)
        for selector, text in (("#select-from", "3"), ("#select-to", "9")):
            explorer.find(selector).send_keys(text, Keys.TAB)
        explorer.browser.execute_script("document.querySelector('.lanes').focus()")
        self.press(explorer, "g", "g", Keys.ENTER, "z")
        link = {"path": "1", "colour": "microbatch", "find": "stage 1", "from": "3", "to": "9", "zoom": "3,9"}
        WebDriverWait(explorer.browser, DEADLINE, poll_frequency=0.01).until(lambda _: explorer.fields == link)
        assert self.asked(explorer) == 1
        seen = [explorer.text(selector) for selector in ("#found", "#view", "#window")]
        assert "Ranks in 3 to 9" in seen[2]
        explorer.open(**link)
        assert explorer.fields == link
        assert [explorer.text(selector).replace("1 of ", "") for selector in ("#found", "#view", "#window")] == [
            text.replace("1 of ", "") for text in seen
        ]
        assert explorer.find("#path").is_selected()
        assert explorer.find("#colour").get_property("value") == "microbatch"

    @pytest.mark.exhaustive
    def test_undo_takes_marks_back_one_by_one(self, explorer: Explorer) -> None:
        explorer.open(schedule="1f1b")
        self.press(explorer, "c")
        explorer.find("#colour option:nth-child(2)").click()
        assert explorer.fields == {"path": "1", "colour": "chunk"}
        explorer.browser.back()
        assert explorer.settled().find("#colour").get_property("value") == "kind"
        assert explorer.find("#path").is_selected()
        explorer.browser.back()
        assert not explorer.settled().find("#path").is_selected()
        explorer.browser.forward()
        assert explorer.settled().find("#path").is_selected()

    @pytest.mark.exhaustive
    def test_a_microbatch_is_followed_in_the_link_and_in_another_schedule(self, explorer: Explorer) -> None:
        explorer.open(schedule="1f1b", follow=3)
        assert explorer.text("#way") == "microbatch 3: 3 to 21"
        explorer.set("schedule", "gpipe")
        assert explorer.text("#way").startswith("microbatch 3: ")
        assert explorer.fields == {"schedule": "gpipe", "follow": "3"}
        self.press(explorer, Keys.ESCAPE)
        assert explorer.fields == {"schedule": "gpipe"}

    @pytest.mark.exhaustive
    def test_a_drag_on_the_axis_fills_the_boxes_and_the_table(self, explorer: Explorer) -> None:
        explorer.open(schedule="1f1b")
        axis = explorer.find(".axis")
        drag = ActionChains(explorer.browser).move_to_element_with_offset(axis, -50, 0).click_and_hold()
        drag.move_by_offset(60, 0).move_by_offset(60, 0).release().perform()
        first, last = (explorer.settled().find(f"#select-{name}").get_property("value") for name in ("from", "to"))
        assert 0 < float(first) < float(last) < 33
        assert explorer.fields == {"from": first, "to": last}
        assert explorer.text("#window").startswith("Ranks in ")
        explorer.find("#unselect").click()
        assert explorer.settled().fields == {}
        assert "the whole step" in explorer.text("#window summary")
        explorer.browser.back()
        assert explorer.settled().fields == {"from": first, "to": last}

    @pytest.mark.exhaustive
    def test_numbers_can_be_typed(self, explorer: Explorer) -> None:
        explorer.open(schedule="1f1b")
        box = explorer.find("#field-microbatches")
        box.clear()
        box.send_keys("10", Keys.TAB)
        assert explorer.settled().fields == {"microbatches": "10"}

    @pytest.mark.exhaustive
    def test_a_phone_keeps_the_timeline_in_view_while_a_slider_moves(self, explorer: Explorer) -> None:
        metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
        explorer.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        try:
            explorer.open(schedule="zb-v")
            sheet, lanes = explorer.find("#sheet").rect, explorer.find(".lanes").rect
            explorer.set("microbatches", 3, moving=True)
            assert explorer.find(".lanes").rect == lanes
            assert explorer.browser.execute_script("return scrollY") == 0
            assert lanes["y"] + lanes["height"] / 2 < sheet["y"]
            assert explorer.browser.execute_script("return document.documentElement.scrollWidth") <= 390
            assert explorer.find("#field-ranks").is_displayed()
            explorer.find("#fold").click()
            assert not explorer.find("#controls").is_displayed()
            explorer.find("#fold").click()
            assert explorer.find("#controls").is_displayed()
        finally:
            explorer.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert not explorer.find("#fold").is_displayed()
