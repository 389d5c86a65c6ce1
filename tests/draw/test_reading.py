"""The page in a browser: idle time, ranges of time, what is found, colours, and memory caps."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pipeflow import make_schedule, simulate
from pipeflow.core.action import Kind
from pipeflow.core.analysis.idle_time import causes
from pipeflow.core.analysis.measures import utilisations
from pipeflow.core.errors import UsageError
from pipeflow.draw import html
from pipeflow.draw.page.timeline_data import palettes
from tests.browser import MARKS, webdriver
from tests.draw.opened import Page
from tests.draw.samples import SAMPLES, planned, reducing, with_bytes

ActionChains, Keys = webdriver.ActionChains, webdriver.Keys

pytestmark = MARKS


def rgb(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


def test_idle_time_that_is_pointed_at_says_why(page: Page) -> None:
    timeline = planned()
    page.open(timeline, unit="ms")
    x, y = page.place(timeline, "1B0")
    start = next(span.start for span in timeline.rows[1] if str(span.action) == "1B0")
    before = max(span.end for span in timeline.rows[1] if span.end <= start)
    width = page.find(".focused").rect["width"]
    page.press(Keys.ESCAPE)
    page.point(x - width, y).perform()
    cause = next(cause for cause in causes(timeline)[1] if str(cause.span.action) == "1B0")
    assert page.text("#tip") == f"Idle for {start - before:g} ms ({before:g} ms to {start:g} ms): {cause}."


def idle(told: str) -> tuple[int, float]:
    """The rank and the length of an idle time that was told."""
    match = re.match(r"Rank (\d+)\. Idle for (\S+) \(", told)
    assert match, told
    return int(match[1]), float(match[2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["1f1b", "transfers", "measured", "reductions", "empty", "overlapping"])
def test_keys_walk_over_all_idle_times(page: Page, name: str) -> None:
    """They are the times of the makespan in which a rank does not compute."""
    timeline = SAMPLES[name]
    page.open(timeline)
    expected: list[tuple[int, float, str]] = []
    told = ""
    for rank, row in enumerate(timeline.on(timeline.streams[0]) if timeline.streams else timeline.rows):
        time = 0.0
        for span in row:
            if span.start > time + 1e-6:
                expected.append((rank, span.start - time, f"{span.action} on rank {rank} "))
            time = max(time, span.end)
        if timeline.makespan > time + 1e-6:
            expected.append((rank, timeline.makespan - time, f"nothing is left to do on rank {rank} after"))
    for rank, length, why in expected:
        page.press("g")
        told = page.text("#spoken")
        assert idle(told)[0] == rank
        assert idle(told)[1] == pytest.approx(length, rel=1e-4)
        assert why in told
    if len(expected) > 1:
        page.press("g")  # the first one again
        assert page.text("#spoken").startswith(f"Rank {expected[0][0]}. Idle for ")
        ActionChains(page.browser).key_down(Keys.SHIFT).send_keys("g").key_up(Keys.SHIFT).perform()
        assert page.text("#spoken") == told


@pytest.mark.exhaustive
def test_from_idle_time_to_the_blocks_around_it(page: Page) -> None:
    page.open(planned()).press("g")  # before 0B0
    page.walk(Keys.ARROW_RIGHT)
    assert page.text("#tip h3").startswith("0B0")
    page.walk(Keys.ARROW_LEFT)
    assert page.text("#tip h3").startswith("0F3")
    page.press("g", Keys.ENTER)
    page.walk(Keys.ARROW_LEFT)
    assert page.text("#tip h3").startswith("0F3")


def selected(page: Page) -> tuple[float, float] | None:
    """The part of the lanes that is marked as selected, in times of the first timeline."""
    page.settled()
    mark = page.find(".selected")
    if not mark.is_displayed():
        return None
    page.press("z")
    first, last = page.seen()
    page.press("0")
    return first, last


@pytest.mark.exhaustive
def test_a_drag_on_the_axis_selects_a_range_to_zoom_to(page: Page) -> None:
    page.open(planned())
    axis = page.find(".axis")
    ActionChains(page.browser).move_to_element_with_offset(axis, 0, 0).click_and_hold().move_by_offset(
        100, 0
    ).release().perform()
    found = selected(page)
    assert found is not None
    width = page.find(".lanes").rect["width"]
    assert 0 < found[0] < found[1] < 33
    assert found[1] - found[0] == pytest.approx(100 * 33 / width, rel=0.2)
    assert page.text("#way") == ""
    page.press(Keys.ESCAPE)
    assert selected(page) is None
    axis.click()
    assert selected(page) is None


@pytest.mark.exhaustive
def test_keys_select_from_one_block_to_another(page: Page) -> None:
    timeline = planned()
    page.open(timeline)
    page.place(timeline, "0F2")
    page.press("[")
    page.settled()
    assert page.find(".selected").rect["width"] == pytest.approx(page.find(".focused").rect["width"], abs=4)
    page.walk(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.press("]")
    assert page.text("#spoken") == "selected: 2 to 12"
    assert selected(page) == (2, 12)


def sought(page: Page, text: str) -> str:
    box = page.find("#find")
    box.clear()
    box.send_keys(text)
    return page.text("#found")


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("2F0", 1),
        ("2f0", 1),
        ("F0", 4),
        ("2F", 8),
        ("B", 32),
        ("stage 2", 16),
        ("rank 1 B", 8),
        ("rank1,microbatch 3", 2),
    ],
)
def test_what_is_found_is_counted_and_marked(page: Page, text: str, matches: int) -> None:
    page.open(planned())
    before = page.picture()
    assert sought(page, text).split() == [str(matches), "match" if matches == 1 else "matches"]
    assert page.picture() != before
    page.find("#find").send_keys(Keys.ESCAPE)
    assert page.text("#found") == ""
    assert page.picture() == before


@pytest.mark.exhaustive
def test_enter_goes_from_match_to_match(page: Page) -> None:
    page.open(planned())
    sought(page, "microbatch 7 B")
    for number, action in enumerate(["3B7", "2B7", "1B7", "0B7", "3B7"]):
        page.find("#find").send_keys(Keys.ENTER)
        assert page.text("#found") == f"{number % 4 + 1} of 4 matches"
        assert page.text("#spoken").startswith(f"{action}, backward")
        assert page.find(".focused").is_displayed()
    page.find("#find").send_keys(Keys.SHIFT, Keys.ENTER)
    assert page.text("#spoken").startswith("0B7")


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", ["2G0", "four", "2", "stage", "rank x", "2F0!"])
def test_what_cannot_be_read_says_the_form_that_is_expected(page: Page, text: str) -> None:
    page.open(planned())
    before = page.picture()
    assert sought(page, text).startswith("write an action such as 2F0")
    assert page.picture() == before
    page.find("#find").send_keys(Keys.ENTER)


@pytest.mark.exhaustive
def test_what_is_not_there_is_said(page: Page) -> None:
    page.open(planned())
    assert sought(page, "9F0") == "nothing matches 9F0"


@pytest.mark.exhaustive
def test_keys_that_are_typed_do_nothing_else(page: Page) -> None:
    page.open(planned())
    sought(page, "c0+-gz")
    assert page.find("#find").get_property("value") == "c0+-gz"
    assert not page.find("#path").is_selected()
    assert page.seen() == (0, 33)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["chunk", "microbatch"])
def test_colours_stand_for_what_is_chosen(page: Page, mode: str) -> None:
    timeline = planned("interleaved-1f1b", chunks=2)
    page.open(timeline)
    x, y = page.place(timeline, "4F1")  # of chunk 1
    page.press(Keys.ESCAPE)
    page.find(f"#colour option:nth-child({2 if mode == 'chunk' else 3})").click()
    assert page.colour(x, y) == rgb(palettes(Kind.F, 2, 8)[mode][1])
    shown = [
        entry.get_attribute("class")
        for entry in page.browser.find_elements("css selector", ".legend li")
        if entry.is_displayed()
    ]
    assert {name.split()[0] for name in shown if name.startswith("by-")} == {f"by-{mode}"}
    page.point(x, y).perform()
    background = page.find("#tip i").value_of_css_property("background-color")
    assert all(str(part) in background for part in rgb(palettes(Kind.F, 2, 8)[mode][1]))


def lane_pixels(page: Page) -> set[tuple[int, ...]]:
    page.settled()
    script = """
        const lanes = document.querySelector(".lanes");
        const data = lanes.getContext("2d").getImageData(0, 0, lanes.width, lanes.height).data;
        const found = new Set();
        for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 3).join());
        return [...found];"""
    texts: list[str] = page.browser.execute_script(script)
    return {tuple(map(int, text.split(","))) for text in texts}


@pytest.mark.exhaustive
def test_memory_above_the_cap_has_another_colour_and_says_by_how_much(page: Page) -> None:
    timeline = with_bytes()
    accent = (200, 16, 46)
    assert accent not in lane_pixels(page.open(timeline))
    page.open(timeline, memory_cap=9 * 2**30)
    assert accent in lane_pixels(page)
    x, y = page.place(timeline, "0F3")
    assert "12 GiB, 3 GiB above the cap of 9 GiB" in page.text("#spoken")
    page.press(Keys.ESCAPE)
    page.point(x, y + 31).perform()
    assert "rank 0 keeps 12 GiB, 3 GiB above the cap of 9 GiB at 3." in page.text("#tip")
    above = [row["cap"]["above"] for row in data_of(page)["timelines"][0]["rows"]]
    assert [bool(each) for each in above] == [peak > 9 * 2**30 for peak in timeline.peak_bytes]


def data_of(page: Page) -> Any:
    return page.browser.execute_script("return JSON.parse(document.getElementById('data').textContent)")


@pytest.mark.exhaustive
def test_each_rank_may_have_its_own_cap() -> None:
    assert html(planned(), memory_cap=[4, 3, 2, 1]).count("above the cap") == 0
    assert "1 activations above the cap of 3" in html(planned(), memory_cap=[3, 3, 2, 1])
    with pytest.raises(UsageError, match="2 numbers for 4 ranks"):
        html(planned(), memory_cap=[1, 2])


@pytest.mark.exhaustive
def test_every_rank_says_how_busy_it_is(page: Page) -> None:
    timeline = reducing("1f1b", 4)
    page.open(timeline)
    rows = data_of(page)["timelines"][0]["rows"]
    assert [row["used"] for row in rows] == [f"{used:.1%}" for used in utilisations(timeline)]


def test_slices_are_told_apart(page: Page) -> None:
    timeline = simulate(make_schedule("seq1f1b", ranks=2, microbatches=2, slices=11))
    page.open(timeline)
    waiting = next(cause for cause in causes(timeline)[0] if str(cause.span.action) == "0B0.10")
    assert waiting.value is not None
    page.place(timeline, "0B0.10")
    told = page.text("#spoken")
    assert "microbatch 0.10" in told
    assert f"{waiting.value} " in told
    for text, matches in (("F0.1", 2), ("F0.10", 2), ("F0", 22), ("0F1.9", 1)):
        assert sought(page, text).split()[0] == str(matches)
