"""The focus stays where the reader is, whatever changes under it; and all is reached with few keys."""

from __future__ import annotations

from typing import Any

import pytest
from selenium.webdriver import ActionChains, Keys

from tests.browser import MARKS
from tests.explore.explorer import Explorer

pytestmark = MARKS

NAME = (
    "const {activeElement: one} = document;"
    "return one.tagName === 'CANVAS' ? 'canvas' : one.id || one.ariaLabel || one.textContent.slice(0, 40)"
)
FOCUS = "[...document.querySelectorAll('button, summary')].find((each) => each.textContent === arguments[0]).focus()"


def focused(explorer: Explorer) -> str:
    return str(explorer.settled().browser.execute_script(NAME))


def press(explorer: Explorer, *keys: str) -> str:
    """Presses keys together, and returns what has the focus then."""
    chain = ActionChains(explorer.browser, duration=0)
    for key in keys:
        chain.key_down(key)
    for key in reversed(keys):
        chain.key_up(key)
    chain.perform()
    return focused(explorer)


def at(explorer: Explorer, name: str) -> None:
    """Gives the focus to the button with a text."""
    explorer.browser.execute_script(FOCUS, name)


def stops(explorer: Explorer) -> list[str]:
    """What Tab goes to, from the top of the page to the timeline and to the end."""
    explorer.browser.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    found: list[str] = []
    while (name := press(explorer, Keys.TAB)) and (not found or name != found[0]) and len(found) < 80:
        found.append(name)
    return found


@pytest.mark.exhaustive
def test_tab_stops_once_in_each_toolbar_and_skips_to_the_picture(explorer: Explorer) -> None:
    explorer.open(schedule="zb-h1", memory_cap=2)
    found = stops(explorer)
    boxes = [each for each in found if each.startswith("field-")]
    assert found[0] == "skip"
    folds = [each for each in found if each in ("Memory", "Options", "Costs", "Words")]
    sliders = [each for each in found if each in ("moment", "edge", "wipe")]
    assert len(found) - len(boxes) - len(folds) - len(sliders) <= 8, found
    explorer.browser.execute_script("document.getElementById('skip').focus()")
    assert press(explorer, Keys.ENTER) == "canvas"
    explorer.browser.execute_script("document.getElementById('path').focus()")
    assert [press(explorer, Keys.ARROW_RIGHT) for _ in range(4)] == ["farther", "closer", "whole", "colour"]
    assert press(explorer, Keys.ARROW_LEFT) == "whole"
    press(explorer, Keys.TAB)
    assert press(explorer, Keys.SHIFT, Keys.TAB) == "whole"


@pytest.mark.exhaustive
def test_a_block_keeps_the_focus_when_the_timeline_is_drawn_anew(explorer: Explorer) -> None:
    explorer.open(microbatches=6).set("latency", 0.5)
    explorer.browser.execute_script("document.querySelector('.lanes').focus()")
    for _ in range(3):
        press(explorer, Keys.SHIFT, Keys.ARROW_RIGHT)
    before = explorer.text("#spoken").split(",")[0]
    explorer.browser.back()
    assert focused(explorer) == "canvas"
    press(explorer, Keys.SHIFT, Keys.ARROW_RIGHT)
    press(explorer, Keys.SHIFT, Keys.ARROW_LEFT)
    assert explorer.text("#spoken").split(",")[0] == before


@pytest.mark.exhaustive
def test_what_disappears_leaves_the_focus_to_what_stands_there(explorer: Explorer) -> None:
    explorer.open(schedule="1f1b,gpipe,zb-h1", ranks=2, **{"from": 1, "to": 3})
    explorer.browser.execute_script("document.querySelector('[aria-label=\"Remove gpipe\"]').focus()")
    assert press(explorer, Keys.ENTER) == "Remove zb-h1"
    assert press(explorer, Keys.ENTER) == "open"  # behind what was beside it
    explorer.browser.execute_script("document.getElementById('unselect').focus()")
    assert press(explorer, Keys.ENTER) == "select-to"
    at(explorer, "Edit")
    assert press(explorer, Keys.ENTER) == "Done"
    assert press(explorer, Keys.ENTER) == "Edit"


@pytest.mark.exhaustive
def test_an_edit_and_its_undo_leave_the_focus_in_place(explorer: Explorer) -> None:
    explorer.open(schedule="1f1b", ranks=2, microbatches=3)
    at(explorer, "Edit")
    press(explorer, Keys.ENTER)
    explorer.browser.execute_script("document.querySelector('.lanes').focus()")
    press(explorer, Keys.SHIFT, Keys.ARROW_RIGHT)
    assert press(explorer, Keys.ALT, Keys.ARROW_RIGHT) == "canvas"
    assert press(explorer, Keys.CONTROL, "z") == "canvas"
    explorer.browser.execute_script("document.querySelector('[aria-label=\"Move later\"]').focus()")
    before = explorer.fields["rows"]
    for _ in range(2):
        assert press(explorer, Keys.ENTER) == "Move later"
    assert explorer.fields["rows"] != before
    assert explorer.find(".focused").is_displayed()
    at(explorer, "Undo")
    while explorer.find("#editor").is_displayed() and "rows" in explorer.fields:
        assert press(explorer, Keys.ENTER) in ("Undo", "Edit", "Redo")
    assert focused(explorer) != ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("selector", [".help", "#export"])
def test_escape_closes_what_is_open_and_returns(explorer: Explorer, selector: str) -> None:
    explorer.open()
    summary: Any = explorer.find(f"{selector} summary")
    explorer.browser.execute_script("arguments[0].focus()", summary)
    press(explorer, Keys.ENTER)
    assert explorer.find(selector).get_property("open")
    assert press(explorer, Keys.ESCAPE) == summary.get_property("textContent")
    assert not explorer.find(selector).get_property("open")


def test_every_task_of_the_guide_is_done_with_keys(explorer: Explorer) -> None:
    """In the order of its table; editing and exporting are above and in their own tests."""

    def go(selector: str) -> None:
        """Presses Tab and then the right arrow until an element has the focus."""
        reached = "return document.activeElement === document.querySelector(arguments[0])"
        inside = (
            "return document.activeElement.closest('[role=toolbar]')?.contains(document.querySelector(arguments[0]))"
        )
        for _ in range(80):
            if explorer.browser.execute_script(reached, selector):
                return
            press(explorer, Keys.ARROW_RIGHT if explorer.browser.execute_script(inside, selector) else Keys.TAB)
        raise AssertionError(f"no key goes to {selector}")

    explorer.open(ranks=2, microbatches=4)
    go("#field-microbatches")
    press(explorer, Keys.ARROW_UP)
    assert explorer.fields["microbatches"] == "5"
    go(".lanes")
    press(explorer, Keys.SHIFT, Keys.ARROW_RIGHT)
    press(explorer, "g")
    assert "Idle for" in explorer.text("#spoken")
    press(explorer, Keys.SHIFT, Keys.HOME)
    press(explorer, Keys.ENTER)
    press(explorer, "c")
    press(explorer, "[")
    press(explorer, Keys.SHIFT, Keys.ARROW_RIGHT)
    press(explorer, "]")
    fields = explorer.settled().fields
    assert fields["path"] == "1"
    assert (fields["follow"], "to" in fields) == ("0", True)
    go("#add")
    press(explorer, "g")
    assert explorer.settled().fields["schedule"].startswith("1f1b,g")
    go(".chips li:last-child button")
    press(explorer, Keys.ENTER)
    assert "schedule" not in explorer.fields
    go("#open")
    go("#scatter circle[tabindex='0']")
    press(explorer, Keys.ARROW_RIGHT)
    press(explorer, Keys.ENTER)
    assert explorer.settled().fields["schedule"] != "1f1b"
    go("#find")
    explorer.browser.switch_to.active_element.send_keys("0F1", Keys.ENTER)
    assert "1 of 1 match" in explorer.text("#found")
    go(".open-tour")
    press(explorer, Keys.ENTER)
    assert explorer.settled().find("#tour").is_displayed()
