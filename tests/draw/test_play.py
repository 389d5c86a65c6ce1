"""Time that runs over the timelines: what it says and paints at a moment; and the map of a wide timeline."""

from __future__ import annotations

import re

import pytest

from pipeflow import Timeline, make_schedule, simulate
from tests.browser import DEADLINE, MARKS, webdriver
from tests.draw.opened import Keys, Page

support = pytest.importorskip("selenium.webdriver.support.wait", reason="needs selenium")
pytestmark = MARKS
LAYER = """
const [part, row, rows] = arguments;
const [layer, lanes] = [document.querySelector('.playing'), document.querySelector('.lanes')];
const copy = Object.assign(document.createElement('canvas'), {width: layer.width, height: layer.height});
const context = copy.getContext('2d', {willReadFrequently: true});
context.drawImage(layer, 0, 0);
const scale = layer.width / lanes.clientWidth;
const top = 24 + (row * lanes.clientHeight) / rows + 4;
return [...context.getImageData(part * layer.width, top * scale, 1, 1).data];
"""


def go(page: Page, part: float) -> str:
    """Goes to a moment, and returns what is said about it."""
    script = """
        const moment = document.getElementById('moment');
        moment.value = arguments[0];
        moment.dispatchEvent(new Event('input'));"""
    page.browser.execute_script(script, 1000 * part)
    return page.text("#spoken")


def moment(page: Page) -> float:
    return float(page.browser.execute_script("return document.getElementById('moment').value"))


def busy_and_idle(timeline: Timeline, time: float) -> tuple[int, int]:
    """The number of ranks that compute, and the idle part of all ranks until then in percent."""
    busy = sum(any(span.start <= time < span.end for span in row) for row in timeline.rows)
    computed = sum(min(span.end, time) - span.start for row in timeline.rows for span in row if span.start < time)
    return busy, round(100 * (1 - computed / (time * len(timeline.rows))))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_moment_says_who_is_busy_and_how_much_was_idle(page: Page, name: str) -> None:
    timeline = simulate(make_schedule(name, ranks=4, microbatches=6))
    page.open(timeline)
    for part in (0.11, 0.37, 0.62, 0.93):
        said = go(page, part)
        found = re.search(r": (\d) of 4 ranks busy, (\d+)% idle so far$", said)
        assert found, said
        assert (int(found[1]), int(found[2])) == busy_and_idle(timeline, part * timeline.makespan)
    assert go(page, 1).endswith(f"{busy_and_idle(timeline, timeline.makespan)[1]}% idle so far")


def test_idle_ranks_glow_and_what_is_to_come_is_faint(page: Page) -> None:
    page.open(simulate(make_schedule("gpipe", ranks=4, microbatches=2)))
    go(page, 0.1)  # rank 0 computes, and rank 3 waits
    busy, (red, green, _, seen), future = (
        page.browser.execute_script(LAYER, part, row, 4) for part, row in ((0.075, 0), (0.075, 3), (0.6, 0))
    )
    assert busy[3] == 0  # it looks as before
    assert red > 200 > 90 > green
    assert seen > 0
    assert future[3] > 100


@pytest.mark.parametrize("still", [False, True])
def test_it_plays_and_pauses_and_takes_steps_for_who_wants_less_motion(page: Page, still: bool) -> None:
    features = [{"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        page.open(simulate(make_schedule("1f1b", ranks=2, microbatches=3)))
        page.find("#play").click()
        wait = support.WebDriverWait(page.browser, DEADLINE, poll_frequency=0.02)
        wait.until(lambda _: moment(page) > 0)
        page.browser.execute_script("document.querySelector('.lanes').focus({preventScroll: true})")
        page.press(Keys.SPACE)
        reached = moment(page)
        assert page.text("#play").endswith("Play")
        assert 0 < reached < 1000
        turns = reached * 24 / 1000
        assert (abs(turns - round(turns)) < 1e-6) is still
        page.settled()
        assert moment(page) == reached
        page.press(Keys.ESCAPE)
        assert moment(page) == 0
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_wide_timeline_has_a_map_that_moves_what_is_in_view(page: Page) -> None:
    page.open(simulate(make_schedule("1f1b", ranks=4, microbatches=8)))
    page.settled()
    assert not page.find("#map").is_displayed()
    timeline = simulate(make_schedule("1f1b", ranks=2, microbatches=100))
    page.open(timeline)
    page.settled()
    assert page.find("#map").is_displayed()
    webdriver.ActionChains(page.browser).move_to_element(page.find("#map")).click().perform()
    first, last = page.seen()
    assert last - first == pytest.approx(timeline.makespan / 8, rel=0.02)
    assert (first + last) / 2 == pytest.approx(timeline.makespan / 2, rel=0.02)


def test_the_wheel_alone_says_how_to_zoom_once(page: Page) -> None:
    page.open(simulate(make_schedule("1f1b", ranks=2, microbatches=3))).settled()
    turn = """
        const lanes = document.querySelector('.lanes');
        const {left, top} = lanes.getBoundingClientRect();
        const place = {clientX: left + 200, clientY: top + 5};
        lanes.dispatchEvent(new WheelEvent('wheel', {deltaY: 9, cancelable: true, ...place}));"""
    page.browser.execute_script(turn)
    assert "Ctrl" in page.text("#tip")
    page.press(Keys.ESCAPE)
    page.browser.execute_script(turn)
    assert not page.find("#tip").is_displayed()
