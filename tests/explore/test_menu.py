"""The menu that exports, in a browser."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.core.timeline import Timeline
from pipeflow.schedules import SCHEDULES
from pipeflow.tools.cli import main
from tests.browser import DEADLINE, MARKS
from tests.covering import some
from tests.explore.explorer import Explorer

pytestmark = MARKS

WITH_OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {"extra_warmup": 1},
    "interleaved-1f1b": {"chunks": 3, "group": 8},
    "looped-bfs": {"chunks": 4},
    "hanayo": {"waves": 2},
    "gis": {"chunks": 4},
    "zb-auto": {"memory_cap": 3, "latency": 0.5, "objective": "span"},
}


class Menu:
    """The menu of a page whose downloads go into a folder."""

    def __init__(self, explorer: Explorer, folder: Path) -> None:
        self.explorer, self.browser, self.folder = explorer, explorer.browser, folder
        rules = {"behavior": "allow", "downloadPath": str(folder)}
        self.browser.execute_cdp_cmd("Browser.setDownloadBehavior", rules)
        permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
        self.browser.execute_cdp_cmd("Browser.grantPermissions", permissions)

    def open(self) -> None:
        if not self.explorer.find("#export").get_property("open"):
            self.explorer.find("#export summary").click()

    def press(self, name: str) -> str:
        """Presses a button of the menu, and returns what the menu says then."""
        self.open()
        self.browser.execute_script("document.querySelector('#export output').value = ''")
        buttons = self.browser.find_elements("css selector", "#export button")
        next(button for button in buttons if button.text == name).click()
        deadline = time.monotonic() + DEADLINE
        while not (said := self.explorer.find("#export output").text):
            assert time.monotonic() < deadline
        return str(said)

    def saved(self, button: str, name: str) -> bytes:
        """The content of the file that a button saves."""
        assert self.press(button) == "Saved."
        path, deadline = self.folder / name, time.monotonic() + DEADLINE
        while not path.exists() or [*self.folder.glob("*.crdownload")]:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        content = path.read_bytes()
        path.unlink()
        return content

    def copied(self, button: str) -> str:
        """The text that a button copies."""
        assert self.press(button) == "Copied."
        self.browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        text = self.browser.execute_async_script("navigator.clipboard.readText().then(arguments[0], arguments[0])")
        self.browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": False})
        assert text == self.explorer.find("#export textarea").get_property("value")
        return str(text)


@pytest.fixture
def menu(explorer: Explorer, tmp_path: Path) -> Menu:
    return Menu(explorer, tmp_path)


def exported(capsys: pytest.CaptureFixture[str], name: str, **options: Any) -> str:
    """What `pipeflow export` writes."""
    named = {"latency": "transfer"}
    words = [(f"--{named.get(option, option).replace('_', '-')}", str(value)) for option, value in options.items()]
    assert main(["export", name, *(word for pair in words for word in pair), "--csv", "-"]) == 0
    return capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", some(SCHEDULES, ["1f1b", "interleaved-1f1b", "zb-v", "zb-auto", "dualpipe"]))
def test_the_table_of_every_schedule_is_that_of_pipeflow_export(
    name: str, menu: Menu, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: list[dict[str, Any]] = [{}, {"reduce": 2}, WITH_OPTIONS.get(name, {"ranks": 2, "microbatches": 5})]
    for options in cases:
        menu.explorer.open(schedule=name, **options)
        content = menu.saved("Table (CSV)", f"{name}.csv").decode()
        assert content == exported(capsys, name, **options)
        assert ("REDUCE_GRAD" in content) == ("reduce" in options)
        assert verify(Schedule.from_csv(content)) == []


@pytest.mark.exhaustive
def test_each_of_several_schedules_can_be_chosen(menu: Menu, capsys: pytest.CaptureFixture[str]) -> None:
    menu.explorer.open(schedule="1f1b,zb-h1", ranks=2)
    menu.open()
    which = menu.explorer.find("#export select")
    which.send_keys("zb-h1")
    assert menu.saved("Table (CSV)", "zb-h1.csv").decode() == exported(capsys, "zb-h1", ranks=2)
    assert "'zb-h1'" in menu.copied("Copy Python")
    menu.explorer.open(schedule="1f1b")
    assert not which_is_shown(menu)


def which_is_shown(menu: Menu) -> bool:
    menu.open()
    return bool(menu.explorer.find("#export select").is_displayed())


def test_pictures_and_times_are_files(menu: Menu) -> None:
    menu.explorer.open(schedule="zb-v", ranks=2, microbatches=4)
    assert len(list(Timeline.from_json(menu.saved("Times (JSON)", "zb-v.json").decode()))) == 48
    drawing = menu.saved("Picture (SVG)", "zb-v.svg")
    assert drawing.startswith(b"<svg ")
    picture = menu.saved("Picture (PNG)", "zb-v.png")
    assert picture.startswith(b"\x89PNG")
    width = float(drawing.partition(b' width="')[2].partition(b'"')[0])
    assert int.from_bytes(picture[16:20], "big") == int(2 * width)


@pytest.mark.exhaustive
def test_code_and_links_are_copied(menu: Menu) -> None:
    menu.explorer.open(schedule="zb-h1", ranks=2, latency=0.5)
    assert "pipeflow.make_schedule('zb-h1', ranks=2, microbatches=8)" in menu.copied("Copy Python")
    assert menu.copied("Copy command") == "pipeflow draw zb-h1 --ranks 2 --microbatches 8 --transfer 0.5"
    link = shlex.split(menu.copied("Copy link"))
    assert link == ["pipeflow", "explore", "--link", "#schedule=zb-h1&ranks=2&latency=0.5"]
    menu.explorer.set("factors", "1,2")
    assert menu.press("Copy command") == "No options of pipeflow draw say this: copy the link."


@pytest.mark.exhaustive
def test_keys_open_and_close_the_menu(menu: Menu) -> None:
    menu.explorer.open()
    summary = menu.explorer.find("#export summary")
    keys = ActionChains(menu.browser)
    menu.browser.execute_script("arguments[0].focus()", summary)
    keys.send_keys(Keys.ENTER, Keys.TAB).perform()
    assert menu.browser.switch_to.active_element.text == "Table (CSV)"
    ActionChains(menu.browser).send_keys(Keys.ESCAPE).perform()
    assert menu.browser.switch_to.active_element == summary
    assert not menu.explorer.find("#export").get_property("open")


@pytest.mark.exhaustive
def test_a_number_can_be_typed(explorer: Explorer) -> None:
    """Keys that move the timelines do nothing in a field."""
    box = explorer.open().find("#field-microbatches")
    box.clear()
    box.send_keys("10", Keys.ENTER)
    assert explorer.fields == {"microbatches": "10"}
