"""The page in a browser: what pointer and keys do."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeflow.core.action import Kind
from pipeflow.core.analysis.idle_time import causes
from pipeflow.core.timeline import Timeline
from pipeflow.draw import html
from pipeflow.draw.colours import HUES
from tests.browser import MARKS, webdriver
from tests.draw.opened import Page
from tests.draw.samples import SAMPLES, measured, paired, planned, reducing, with_bytes, with_transfers

ActionChains, Keys = webdriver.ActionChains, webdriver.Keys

pytestmark = MARKS


@pytest.mark.some(3)
@pytest.mark.parametrize("timeline", SAMPLES.values(), ids=SAMPLES)
def test_pages_open_without_complaint(page: Page, timeline: Timeline) -> None:
    page.open(timeline, unit="ms", factor=1000)
    assert page.seen()[0] == 0
    assert page.picture() != "data:,"
    page.walk(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN).press("+", "c", Keys.ENTER, Keys.ESCAPE, "0", "c")


def test_a_block_that_is_pointed_at_says_what_it_is_and_what_it_waited_for(page: Page) -> None:
    timeline = with_transfers("1f1b", 3, 4)
    page.open(timeline, unit="ms", factor=2)
    x, y = page.place(timeline, "1B0")
    page.press(Keys.ESCAPE)
    assert not page.find("#tip").is_displayed()
    page.point(x, y).perform()
    tip = page.text("#tip")
    cause = next(cause for row in causes(timeline) for cause in row if str(cause.span.action) == "1B0")
    assert cause.after is not None
    idle = cause.span.start - timeline.rows[1][timeline.rows[1].index(cause.span) - 1].end
    assert tip.startswith("1B0backward")
    assert f"start{cause.span.start * 2:g} ms" in tip
    assert f"end{cause.span.end * 2:g} ms" in tip
    assert f"duration{(cause.span.end - cause.span.start) * 2:g} ms" in tip
    assert "stage1 (chunk 0 of its rank)microbatch0rank1" in tip
    assert f"{cause}; rank 1 was idle for {idle * 2:g} ms." in tip


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["transfers", "measured", "pairs", "overlapping"])
def test_keys_walk_over_all_blocks_of_a_rank_and_say_their_causes(page: Page, name: str) -> None:
    timeline = SAMPLES[name]
    page.open(timeline)
    for index, cause in enumerate(causes(timeline)[0]):
        page.walk(Keys.ARROW_RIGHT)
        told = page.text("#spoken")
        assert told.startswith(f"{timeline.rows[0][index].action}, ")
        assert str(cause) in told


@pytest.mark.exhaustive
def test_reductions_say_what_they_are_to_pointer_and_keys(page: Page) -> None:
    timeline = reducing("1f1b", 4)
    page.open(timeline)
    x, y = page.place(timeline, "2B7")
    page.walk(Keys.ARROW_RIGHT)
    told = page.text("#spoken")
    assert told.startswith(
        "2R7, gradient reduction, stage 2 (chunk 0 of its rank), last microbatch 7, rank 2, start 29,"
    )
    assert "2R7 on rank 2 came after 2B7." in told
    frame, lanes = page.find(".focused").rect, page.find(".lanes").rect
    middle = frame["x"] + frame["width"] / 2 - lanes["x"] - lanes["width"] / 2
    below = frame["y"] + frame["height"] / 2 - lanes["y"] - lanes["height"] / 2
    page.press(Keys.ESCAPE)
    page.point(middle, below).perform()
    assert page.find("#tip").is_displayed()
    assert page.text("#tip").startswith("2R7gradient reduction")
    page.press(Keys.ESCAPE)
    page.point(x, y).click().perform()
    assert page.text("#way") == "microbatch 7: 21 to 33"
    page.point(middle, below).click().perform()  # a reduction is no microbatch's
    assert page.text("#way") == ""


@pytest.mark.exhaustive
def test_up_and_down_stay_on_the_stream_where_the_other_rank_has_it(page: Page) -> None:
    timeline = reducing("1f1b", 4)
    page.open(timeline)
    page.place(timeline, "2R7")
    page.walk(Keys.ARROW_UP)
    assert page.text("#tip h3").startswith("1R7")
    page.walk(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.text("#tip h3").startswith("3R7")


@pytest.mark.exhaustive
def test_a_pair_says_what_it_is_overlapped_with(page: Page) -> None:
    page.open(paired()).walk(*[Keys.ARROW_RIGHT] * 3)
    assert "Overlapped with 0B0." in page.text("#tip")


@pytest.mark.exhaustive
def test_memory_says_how_much_is_kept(page: Page) -> None:
    timeline = with_bytes()
    page.open(timeline)
    x, y = page.place(timeline, "0F3")
    page.point(x, y + 21).perform()
    assert "rank 0 keeps 12 GiB at 3." in page.text("#tip")


@pytest.mark.exhaustive
def test_the_critical_path_is_off_at_first_and_its_switch_dims_what_is_not_on_it(page: Page) -> None:
    timeline = planned("1f1b", 3, 4)
    page.open(timeline)
    on, off = page.place(timeline, "2B1"), page.place(timeline, "0F2")
    switch = page.find("#path")
    assert not switch.is_selected()
    before = page.picture(), page.colour(*on), page.colour(*off)
    switch.click()
    assert switch.is_selected()
    assert page.colour(*on) == before[1] == list(HUES[Kind.B].rgb)
    assert page.colour(*off) != before[2] == list(HUES[Kind.F].rgb)
    switch.click()
    assert page.picture() == before[0]
    page.press("c")
    assert switch.is_selected()


@pytest.mark.exhaustive
def test_a_page_opens_with_the_critical_path_where_that_was_asked_for(page: Page) -> None:
    timeline = planned("1f1b", 3, 4)
    switched = page.open(timeline)
    switched.press("c")
    page.settled()
    picture = page.picture()
    page.open(timeline, critical_path=True)
    page.settled()
    assert page.find("#path").is_selected()
    assert page.picture() == picture


@pytest.mark.exhaustive
def test_the_wheel_alone_scrolls_the_page(page: Page) -> None:
    page.open(planned(ranks=32))
    before = page.seen()
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(page.find(".lanes"), 0, 0)
    ActionChains(page.browser).scroll_from_origin(origin, 0, 200).perform()
    page.browser.execute_async_script(
        "const done = arguments[0]; (function look() { scrollY === 200 ? done() : requestAnimationFrame(look); })()"
    )
    assert page.seen() == before


@pytest.mark.exhaustive
def test_the_wheel_with_ctrl_zooms_around_the_pointer(page: Page) -> None:
    timeline = planned()
    page.open(timeline)
    x, y = page.place(timeline, "1B3")
    everything = page.picture()
    page.point(x, y).perform()
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(page.find(".lanes"), round(x), round(y))
    chain = ActionChains(page.browser).key_down(Keys.CONTROL).scroll_from_origin(origin, 0, -400)
    chain.key_up(Keys.CONTROL).perform()
    first, last = page.seen()
    span = next(span for span in timeline if str(span.action) == "1B3")
    assert last - first == pytest.approx(33 * 2.718281828 ** (-0.8), rel=1e-3)
    assert first < span.start < span.end < last
    assert page.text("#tip h3").startswith("1B3")
    assert page.picture() != everything
    page.double_click()
    assert page.seen() == (0, 33)


@pytest.mark.exhaustive
def test_dragging_moves(page: Page) -> None:
    page.open(planned()).press("+", "+")
    first, last = page.seen()
    page.point(0, 0).click_and_hold().move_by_offset(-40, 0).move_by_offset(-60, 0).release().perform()
    moved, end = page.seen()
    assert moved > first
    assert end - moved == pytest.approx(last - first, rel=1e-4)
    assert page.text("#way") == ""


@pytest.mark.exhaustive
def test_two_fingers_zoom_and_the_times_under_them_stay(page: Page) -> None:
    timeline = planned()
    page.open(timeline)
    box = page.find(".lanes").rect
    centre, y = box["x"] + box["width"] / 2, box["y"] + 60

    def touch(kind: str, *apart: float) -> None:
        points = [
            {"x": centre + side * each, "y": y, "id": number} for each in apart for number, side in enumerate((-1, 1))
        ]
        page.browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        page.settled()

    touch("touchStart", 50)
    for apart in (60, 80, 100):
        touch("touchMove", apart)
    touch("touchEnd")
    first, last = page.seen()
    assert last - first == pytest.approx(33 / 2, rel=0.02)
    page.press("0")
    assert page.seen() == (0, 33)


@pytest.mark.exhaustive
def test_keys_and_buttons_zoom_and_move(page: Page) -> None:
    page.open(planned()).press("+")
    assert page.seen() == (5.5, 27.5)
    page.press(Keys.ARROW_RIGHT)
    assert page.seen() == pytest.approx((8.8, 30.8))
    page.press(Keys.ARROW_LEFT, "-")
    assert page.seen() == (0, 33)
    page.find("#closer").click()
    assert page.seen() == (5.5, 27.5)
    page.press("0")
    assert page.seen() == (0, 33)
    page.press(*["+"] * 40)
    first, last = page.seen()
    assert last - first == pytest.approx(1.5, rel=1e-3)  # one and a half of the shortest block
    page.find("#whole").click()
    page.press("-")
    assert page.seen() == (0, 33)


def test_a_click_follows_a_microbatch_through_the_ranks(page: Page) -> None:
    timeline = planned()
    page.open([timeline, measured()])
    x, y = page.place(timeline, "2F3")
    page.press(Keys.ESCAPE)
    plain = page.picture(), page.picture(1)
    page.point(x, y).click().perform()
    way = [span for span in timeline if span.action.microbatch == 3]
    first, last = min(span.start for span in way), max(span.end for span in way)
    assert page.text("#way").startswith(f"microbatch 3: {first:g} to {last:g}; ")
    assert page.picture() != plain[0]
    assert page.picture(1) != plain[1]
    page.find("#forget").click()
    assert page.text("#way") == ""
    page.point(x, y).click().click().perform()
    assert page.text("#way") == ""
    page.press(Keys.ENTER)
    assert page.text("#way").startswith("microbatch 3")
    page.press(Keys.ESCAPE)
    assert page.text("#way") == ""


@pytest.mark.exhaustive
def test_two_timelines_have_one_time_scale(page: Page) -> None:
    page.open([planned("1f1b", 2, 2), planned("1f1b", 2, 8)])
    assert page.seen() == (0, 27)
    page.walk(Keys.ARROW_RIGHT)
    first = page.find(".focused", 0).rect
    page.browser.execute_script("arguments[0].focus()", page.find(".lanes", 1))
    page.walk(Keys.ARROW_RIGHT)
    assert page.find(".focused", 1).rect["width"] == first["width"]
    assert page.find(".focused", 1).rect["x"] == first["x"]


@pytest.mark.exhaustive
def test_equal_times_stand_below_each_other_whatever_the_lanes_are_called(page: Page) -> None:
    page.open([reducing("1f1b", 4), planned("1f1b", 4, 8)])
    page.walk(Keys.ARROW_RIGHT)
    first = page.find(".focused", 0).rect
    page.browser.execute_script("arguments[0].focus()", page.find(".lanes", 1))
    page.walk(Keys.ARROW_RIGHT)
    assert page.find(".focused", 1).rect["x"] == first["x"]


@pytest.mark.exhaustive
def test_the_page_follows_the_scheme_and_prints_on_white(page: Page) -> None:
    def emulate(**media: Any) -> None:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def ground() -> str:
        page.settled()
        return str(page.browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor"))

    page.open(planned())
    emulate(features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert ground() != "rgb(255, 255, 255)"
    dark = page.picture()
    emulate(media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert ground() == "rgb(255, 255, 255)"
    assert not page.find(".bar").is_displayed()
    emulate(media="", features=[{"name": "prefers-color-scheme", "value": "light"}])
    assert page.picture() != dark
    assert page.browser.print_page()
    emulate(features=[])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Where the files of the page are served as they are."""
    for path in (Path(html.__globals__["__file__"]).parent).glob("*.js"):
        shutil.copy(path, tmp_path)
    handler = partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: the tests' output is theirs."""


@pytest.mark.exhaustive
def test_the_modules_work_where_they_are_served(page: Page, served: str) -> None:
    """As they do in the one file."""
    page.open(planned())
    alone = page.picture()
    text = re.sub(r"script-src '[^']*'", "script-src 'self'", page.path.read_text(encoding="utf-8"))
    begin, end = text.rindex("<script>"), text.rindex("</script>")
    page.path.with_name("index.html").write_text(
        f'{text[:begin]}<script type="module" src="main.js">{text[end:]}', encoding="utf-8"
    )
    page.browser.get(served)
    assert page.picture() == alone
    page.walk(Keys.ARROW_RIGHT)
    assert page.text("#tip h3").startswith("0F0")


@pytest.mark.exhaustive
def test_names_are_text(page: Page) -> None:
    page.open(SAMPLES["hostile"], unit="<img src=x onerror=alert(1)>").walk(Keys.ARROW_RIGHT)
    assert "alert(1)" in page.text("h2")
    assert "onerror" in page.text("#tip")
    assert page.browser.find_elements("css selector", "img") == []


@pytest.mark.exhaustive
def test_a_narrow_window_needs_no_sideways_scrolling(page: Page) -> None:
    page.open([planned("interleaved-1f1b", chunks=3), measured()], unit="ms")
    metrics = {"width": 360, "height": 700, "deviceScaleFactor": 2, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.settled()
        assert page.browser.execute_script("return document.documentElement.scrollWidth") <= 360
        assert page.find(".lanes").get_property("width") == 2 * page.find(".lanes").rect["width"]
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.exhaustive
def test_a_large_page_opens_and_zooms(page: Page) -> None:
    """64 ranks, 512 microbatches, nearly a hundred thousand blocks."""
    page.open(planned("zb-h1", 64, 512))
    assert "colours are mixed" in page.text("#view")
    page.press(*["+"] * 12)
    assert "colours are mixed" not in page.text("#view")
    page.press("c")
    page.point(0, 0).perform()
    assert page.text("#tip")
