"""The conclusion above the timelines, the slider that wipes from one to the other, and what is folded at first."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pipeflow.core.text import percent
from pipeflow.draw.page.glossary import GLOSSARY
from pipeflow.schedules import SCHEDULES
from pipeflow.tools.explore.state import State
from pipeflow.tools.explore.views import headline, plan
from tests.browser import MARKS
from tests.explore.explorer import Explorer


def told(**fields: str) -> dict[str, Any]:
    state = State.of(fields)
    return headline(state, [state.timeline(name) for name in state.schedules])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_headline_says_the_bubble_and_puts_the_worse_one_before(schedule: str) -> None:
    found = told(schedule=schedule)
    shown = State.of({"schedule": schedule}).timeline(schedule)
    assert found["idle"] == f"{shown.makespan_bubble_ratio:.0%} idle"
    assert f"waits for {percent(shown.makespan_bubble_ratio)} of the step" in found["said"]
    before, after = (int(re.findall(r"(\d+)% idle", found["sides"][side])[0]) for side in ("before", "after"))
    assert before >= after
    assert found["sides"][found["first"]].startswith(f"{schedule}: ")
    assert found["other"] in ("1f1b", "zb-v")
    assert found["other"] != schedule


def test_two_schedules_are_compared_with_each_other_and_a_sentence_says_the_gain() -> None:
    found = told(schedule="zb-v,gpipe")
    assert (found["idle"], found["first"], found["other"]) == ("27% \N{RIGHTWARDS ARROW} 6% idle", "after", "gpipe")
    assert found["said"].endswith("gpipe takes 29.4% more time.")
    same = told(schedule="gpipe,1f1b")
    assert same["said"].endswith("1f1b takes as long.")
    assert same["idle"] == "27% idle"


def test_less_than_a_percent_is_not_nothing() -> None:
    assert told(schedule="gpipe", ranks="2", microbatches="400")["idle"] == "0.2% idle"
    assert told(schedule="gpipe", ranks="1")["idle"] == "0% idle"


def test_what_cannot_be_compared_has_no_other_side() -> None:
    rows = {"rows": "0F0 0B0", "schedule": "custom"}
    assert plan(rows)["headline"]["sides"] is None
    assert plan(rows | {"schedule": "custom,1f1b"})["headline"]["sides"] is None  # other ranks


def test_of_an_order_that_cannot_run_no_idle_time_is_told() -> None:
    found = plan({"rows": "0B0 0F0", "schedule": "custom"})["headline"]
    assert (found["idle"], found["sides"]) == ("not sound", None)
    assert found["said"] == "What is wrong with custom is listed below."


class TestOnThePage:
    pytestmark = MARKS

    def wipe(self, explorer: Explorer, part: int, event: str) -> None:
        script = """
            const wipe = document.getElementById('wipe');
            wipe.value = arguments[0];
            wipe.dispatchEvent(new Event(arguments[1]));"""
        explorer.browser.execute_script(script, part, event)
        explorer.settled()

    def test_the_slider_lays_two_timelines_on_each_other(self, explorer: Explorer) -> None:
        explorer.open()
        assert explorer.text("#conclusion") == "27% idle"
        assert explorer.find("#wipe").get_property("value") == "100"  # all of what is before
        assert [explorer.text(f"#{side}") for side in ("before", "after")] == ["1f1b: 27% idle", "zb-v: 6% idle"]
        for part in (90, 60, 40):
            self.wipe(explorer, part, "input")
        self.wipe(explorer, 40, "change")
        assert explorer.fields == {"schedule": "1f1b,zb-v", "wipe": "40"}
        top = """
            const lanes = [...document.querySelectorAll('.lanes')];
            const [first, second] = lanes.map((each) => each.getBoundingClientRect().top);
            return [first === second, lanes.indexOf(document.elementFromPoint(arguments[0], first + 8))];"""
        edge = explorer.find("#edge").rect["x"]
        assert explorer.browser.execute_script(top, edge - 6) == [True, 0]
        assert explorer.browser.execute_script(top, edge + 6) == [True, 1]
        explorer.browser.back()  # the whole drag is one step
        assert explorer.settled().fields == {}

    @pytest.mark.exhaustive
    def test_a_link_opens_it_and_a_button_ends_it(self, explorer: Explorer) -> None:
        explorer.open(schedule="zb-v,1f1b", wipe=0)  # the better one first: the edge is at the left
        assert explorer.find("#wipe").get_property("value") == "0"
        lanes = explorer.find(".lanes").rect
        assert lanes["x"] < explorer.find("#edge").rect["x"] < lanes["x"] + 80
        explorer.find("#apart").click()
        assert explorer.settled().fields == {"schedule": "zb-v,1f1b"}
        assert explorer.find("section h2", 1).is_displayed()

    def test_three_settings_stand_there_at_first_and_a_link_unfolds_what_it_sets(self, explorer: Explorer) -> None:
        def shown() -> list[str]:
            controls = explorer.browser.find_elements("css selector", ".control")
            return [each.find_element("css selector", "label").text for each in controls if each.is_displayed()]

        explorer.open()
        assert shown() == ["schedule", "ranks", "microbatches"]
        explorer.open(latency="0.5")
        assert {"latency", "forward (F)"} <= {*shown()}
        assert "memory cap" not in shown()

    @pytest.mark.exhaustive
    def test_every_figure_says_what_it_means(self, explorer: Explorer) -> None:
        explorer.open(schedule="zb-v,dualpipe", reduce="1")
        script = """
            const figures = [...document.querySelectorAll('.said span, #compared tbody th, #tables thead th')];
            return figures.filter((each) => !each.title).map((each) => each.textContent);"""
        without = explorer.browser.execute_script(script)
        assert {each for each in without if not re.match(r"(reduction|timeline|actions at)", each)} == set()
        assert len(explorer.texts("#words dt", visible=False)) == len(GLOSSARY)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("width", [1180, 390])
    def test_nothing_moves_once_it_is_drawn(self, explorer: Explorer, width: int) -> None:
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        explorer.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        script = """
            const [done] = arguments;
            new PerformanceObserver((list) => done(list.getEntries().reduce((sum, each) => sum + each.value, 0)))
              .observe({type: "layout-shift", buffered: true});
            setTimeout(() => done(0), 500);"""
        try:
            explorer.open(schedule="1f1b,zb-v", wipe=50)
            assert explorer.browser.execute_async_script(script) < 0.05
        finally:
            explorer.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    @pytest.mark.exhaustive
    def test_no_text_stands_across_the_edge(self, explorer: Explorer) -> None:
        """The texts of both timelines would make a number that neither has."""
        explorer.open(schedule="1f1b,zb-v", wipe=50)
        script = """
            const moment = document.getElementById('moment');
            moment.value = 400;
            moment.dispatchEvent(new Event('input'));
            const layers = [...document.querySelectorAll('.playing')];
            return layers.map((layer) => {
              const copy = Object.assign(document.createElement('canvas'), {width: layer.width, height: 20});
              const context = copy.getContext('2d', {willReadFrequently: true});
              context.drawImage(layer, 0, 0);
              return context.getImageData(0, 0, layer.width, 20).data.some(Boolean);
            });"""
        assert explorer.browser.execute_script(script) == [False, False]
        explorer.find("#apart").click()
        assert explorer.settled().browser.execute_script(script) == [True, True]
