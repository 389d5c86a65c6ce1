"""The page in a browser: controls, its address, and errors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from pipeflow.tools.explore.answers import ANSWERS
from pipeflow.tools.explore.views import plan
from tests.browser import DEADLINE, MARKS
from tests.explore.explorer import Explorer

pytestmark = MARKS


@pytest.mark.exhaustive
def test_a_link_shows_its_schedule(explorer: Explorer) -> None:
    explorer.open(schedule="zb-v", ranks=4, microbatches=6)
    assert explorer.text("#charts h2") == "zb-v, 4 ranks, 2 chunks, 6 microbatches"
    assert explorer.find("#field-microbatches").get_property("value") == "6"


def test_a_control_changes_the_picture_and_the_address(explorer: Explorer) -> None:
    explorer.open(schedule="1f1b").set("microbatches", 5)
    assert explorer.text("#charts h2") == "1f1b, 4 ranks, 5 microbatches"
    assert explorer.fields == {"microbatches": "5"}


@pytest.mark.exhaustive
def test_the_browser_undoes_and_redoes_and_a_drag_is_one_step(explorer: Explorer) -> None:
    explorer.open().set("ranks", 3)
    for microbatches in (9, 10, 11):
        explorer.set("microbatches", microbatches, moving=True)
    explorer.set("microbatches", 11)
    assert explorer.text("#charts h2") == "1f1b, 3 ranks, 11 microbatches"
    explorer.browser.back()
    assert explorer.text("#charts h2") == "1f1b, 3 ranks, 8 microbatches"
    assert explorer.find("#field-microbatches").get_property("value") == "8"
    explorer.browser.back()
    assert explorer.text("#charts h2") == "1f1b, 4 ranks, 8 microbatches"
    explorer.browser.forward()
    explorer.settled().browser.forward()
    assert explorer.text("#charts h2") == "1f1b, 3 ranks, 11 microbatches"


@pytest.mark.exhaustive
def test_arrow_keys_in_a_box_are_a_movement_of_its_slider(explorer: Explorer) -> None:
    box = explorer.open(microbatches=130).find("#field-microbatches")  # beyond the slider
    box.send_keys(Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_DOWN)
    assert explorer.settled().fields == {"microbatches": "131"}
    explorer.browser.back()
    assert explorer.settled().fields == {"microbatches": "130"}
    assert box.get_property("value") == "130"
    cap = explorer.unfold().find("#field-bandwidth")
    assert cap.get_attribute("placeholder") == "no limit"
    cap.send_keys(Keys.ARROW_DOWN)
    assert explorer.settled().fields["bandwidth"] == "63"


@pytest.mark.exhaustive
def test_costs_of_recomputation_appear_with_its_stages(explorer: Explorer) -> None:
    explorer.open()
    costs = [explorer.find(f"#field-{name}") for name in ("recompute", "input_bytes", "unshard", "offload")]
    assert not any(cost.is_displayed() for cost in costs)
    explorer.set("recompute_stages", "0-1")
    assert [cost.is_displayed() for cost in costs] == [True, True, False, False]
    assert "1f1b with recompute" in explorer.text("#charts")
    explorer.set("model", "gpt3-175b")
    assert not any(cost.is_displayed() for cost in costs)


@pytest.mark.exhaustive
def test_every_control_says_what_it_does(explorer: Explorer) -> None:
    for fields in ({}, {"model": "gpt3-175b"}, {"edit": "1", "schedule": "custom", "rows": "0F0 0B0"}, {"tour": "1"}):
        explorer.open(**fields)
        script = (
            "return [...document.querySelectorAll('button, input, select, summary')].filter((each) => "
            "!each.closest('[title]') && each.getAttribute('aria-describedby') !== 'searches' && each.type !== 'file')"
            ".map((each) => each.outerHTML)"
        )
        assert explorer.browser.execute_script(script) == []


def test_an_error_is_said_and_loses_nothing(explorer: Explorer) -> None:
    explorer.open(schedule="chimera").set("ranks", 3)
    assert "even" in explorer.text("#problem")
    assert explorer.text("#charts h2").startswith("chimera, 4 ranks")
    assert any("400" in each for each in explorer.complaints())  # the browser reports the status by itself
    assert explorer.set("ranks", 2).find("#problem").get_property("hidden")
    assert explorer.text("#charts h2").startswith("chimera, 2 ranks")


@pytest.mark.exhaustive
def test_the_page_says_that_it_computes_and_then_no_more(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()

    def slow(fields: Mapping[str, str]) -> dict[str, Any]:
        begun.set()
        end.wait(DEADLINE)
        return plan(fields)

    explorer.open()
    assert explorer.find("#computing").aria_role == "status"
    monkeypatch.setitem(ANSWERS, "plan", slow)
    script = "const box = document.getElementById('field-ranks'); box.value = 3; box.dispatchEvent(new Event('change'))"
    explorer.browser.execute_script(script)
    assert begun.wait(DEADLINE)
    WebDriverWait(explorer.browser, DEADLINE).until(lambda _: explorer.find("#computing").text == "Computing \u2026")
    end.set()
    assert explorer.text("#computing") == ""
