"""Building a schedule by hand on the page: after whatever the reader does, the page shows what `verify` says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.support.wait import WebDriverWait

from pipeflow.core.action import actions_of, parse_entry
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.soundness.verification import verify
from pipeflow.tools.explore.views import plan
from tests.browser import DEADLINE, MARKS
from tests.covering import some
from tests.explore.explorer import Explorer

pytestmark = MARKS

BOXES = """
const [data, places, done] = arguments;
const base = document.baseURI.split("#")[0];
Promise.all([import(base + "data.js"), import(base + "geometry.js")]).then(([{read}, {layOut, margins}]) => {
  const [timeline] = read(data).timelines;
  const lanes = document.querySelector(".lanes");
  lanes.scrollIntoView({block: "center"});
  const {left, top, width} = lanes.getBoundingClientRect();
  const view = {first: 0, last: timeline.makespan || 1};
  const place = layOut(timeline, view, width, margins([timeline]));
  done(timeline.rows.map(({blocks}, rank) => ({
    y: top + rank * place.pitch + place.lanes[0].height / 2, right: left + place.left + place.width - 2,
    boxes: blocks.map((block) => [places[rank][block.index], left + place.x(block.start), left + place.x(block.end)]),
  })));
});
"""
MARKED = """
return [...document.querySelectorAll(".wrong:not([data-position=''])")].map((mark) => {
  const {rank, position} = mark.dataset;
  const box = mark.getBoundingClientRect();
  return [Number(rank), Number(position), (box.left + box.right) / 2, (box.top + box.bottom) / 2];
});
"""
Rows = list[list[str]]


class Point(NamedTuple):
    """A point of the window, in pixels."""

    x: float
    y: float


class Editing:
    """The editor, as a reader uses it."""

    def __init__(self, explorer: Explorer, **fields: object) -> None:
        self.explorer = explorer.open(**fields)
        self.browser = explorer.browser
        self.press("Edit")
        WebDriverWait(self.browser, DEADLINE).until(lambda _: explorer.find("#editor").is_displayed())
        explorer.settled()

    def press(self, text: str) -> None:
        """Clicks a button of the tools."""
        [button] = [each for each in self.browser.find_elements("css selector", "#tools button") if each.text == text]
        button.click()
        self.explorer.settled()

    @property
    def rows(self) -> Rows:
        """The rows in the link."""
        rows = [line.split() for line in self.explorer.fields.get("rows", "").split("\n")]
        ranks = len(self.explorer.fields["placement"].split("."))
        return rows + [[] for _ in range(ranks - len(rows))]

    def schedule(self) -> Schedule:
        """The schedule of the rows in the link."""
        fields = self.explorer.fields
        rows = tuple(tuple(map(parse_entry, row)) for row in self.rows)
        used = [action.microbatch + 1 for row in rows for entry in row for action in actions_of(entry)]
        placement = Placement((tuple(map(int, fields["placement"].split("."))),))
        return Schedule("custom", placement, max(int(fields["rows_microbatches"]), *used, 1), rows)

    def look(self) -> list[dict[str, Any]]:
        """Per rank, where its entries lie in the window."""
        answer = plan(self.explorer.fields)
        found = self.browser.execute_async_script(BOXES, answer["data"], answer["custom"]["places"])
        return [each | {"boxes": {place: (first, end) for place, first, end in each["boxes"]}} for each in found]

    def block(self, rank: int, position: int) -> Point:
        """The middle of an entry."""
        row = self.look()[rank]
        return Point(sum(row["boxes"][position]) / 2, row["y"])

    def gap(self, rank: int, position: int) -> Point:
        """A point at which an entry lands before the entry at `position`."""
        row = self.look()[rank]
        if not row["boxes"]:
            return Point(row["right"] - 50, row["y"])
        if position in row["boxes"]:
            first, end = row["boxes"][position]
            return Point(first + (end - first) / 4, row["y"])
        first, end = row["boxes"][position - 1]
        return Point(end - (end - first) / 4, row["y"])

    def drag(self, start: Point, end: Point) -> None:
        """Drags with the mouse."""
        actions = ActionBuilder(self.browser, duration=0)
        mouse: Any = actions.pointer_action
        mouse.move_to_location(*map(round, start)).pointer_down()
        mouse.move_to_location(round(end.x) - 7, round(end.y)).move_to_location(*map(round, end)).pointer_up()
        actions.perform()
        self.explorer.settled()

    def click(self, at: Point) -> None:
        """Clicks."""
        actions = ActionBuilder(self.browser, duration=0)
        mouse: Any = actions.pointer_action
        mouse.move_to_location(*map(round, at)).click()
        actions.perform()
        self.explorer.settled()

    def type(self, *keys: str) -> None:
        """Presses keys together."""
        actions = ActionChains(self.browser, duration=0)
        for key in keys:
            actions.key_down(key)
        for key in reversed(keys):
            actions.key_up(key)
        actions.perform()
        self.explorer.settled()

    def choose(self, entry: str) -> Point:
        """Sets the controls of the palette; returns the middle of the button with the action."""
        action = parse_entry(entry)
        values = [getattr(action, name) for name in ("kind", "stage", "microbatch")]
        script = (
            "const boxes = document.querySelectorAll('#palette select, #palette input');"
            "boxes.forEach((box, at) => { box.value = arguments[0][at]; box.dispatchEvent(new Event('input')); });"
            "const box = document.querySelector('#palette .chip').getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]"
        )
        return Point(*self.browser.execute_script(script, list(map(str, values))))

    def undo(self) -> None:
        """Presses the button, and waits until the address has changed."""
        before = self.browser.current_url
        self.browser.execute_script(
            "[...document.querySelectorAll('#tools button')].find((each) => each.textContent === 'Undo').click()"
        )
        WebDriverWait(self.browser, DEADLINE, poll_frequency=0.01).until(lambda browser: browser.current_url != before)
        self.explorer.settled()

    def require_truth(self) -> None:
        """The page says what `verify` says, and marks the entries that it names where they are drawn."""
        wrong = verify(self.schedule())
        said = self.explorer.text("#status")
        count = "1 violation" if len(wrong) == 1 else f"{len(wrong)} violations"
        assert said.startswith("Sound." if not wrong else count)
        assert "cannot go on" in said or not any(each.cycle for each in wrong)
        places = {(each.rank, each.position) for each in wrong if each.position is not None}
        marks = {(rank, at): Point(x, y) for rank, at, x, y in self.browser.execute_script(MARKED)}
        assert marks.keys() == places
        look = self.look() if marks else []
        marks = {(rank, at): Point(x, y) for rank, at, x, y in self.browser.execute_script(MARKED)}  # after scrolling
        for (rank, position), mark in marks.items():
            assert mark.x == pytest.approx(sum(look[rank]["boxes"][position]) / 2, abs=3)
            assert mark.y == pytest.approx(look[rank]["y"], abs=3)
        assert len(self.browser.find_elements("css selector", "#violations li")) >= len(wrong)


def moved(rows: Rows, start: tuple[int, int], end: tuple[int, int]) -> Rows:
    """The rows after an entry was moved before another one."""
    rows = [list(row) for row in rows]
    (rank, position), (other, target) = start, end
    entry = rows[rank].pop(position)
    rows[other].insert(target - (rank == other and target > position), entry)
    return rows


def inserted(rows: Rows, rank: int, position: int, entry: str) -> Rows:
    return [[*row[:position], entry, *row[position:]] if at == rank else row for at, row in enumerate(rows)]


def removed(rows: Rows, rank: int, position: int) -> Rows:
    return [[*row[:position], *row[position + 1 :]] if at == rank else row for at, row in enumerate(rows)]


def edits(editing: Editing, seed: int, count: int) -> Iterator[Rows]:
    """Makes random edits; yields the rows that each should have made."""
    chance = random.Random(seed)
    for _ in range(count):
        rows = editing.rows
        rank = chance.choice([rank for rank, row in enumerate(rows) if row])
        at = chance.randrange(len(rows[rank]))
        grown = sum(map(len, rows)) > 14
        kind = chance.choice(["drag", "drag", "drag", "key", "key", "remove" if grown else "insert"])
        if kind == "drag":
            other = chance.randrange(len(rows))
            gaps = [gap for gap in range(len(rows[other]) + 1) if other != rank or gap not in (at, at + 1)]
            if gaps:
                gap = chance.choice(gaps)
                editing.drag(editing.block(rank, at), editing.gap(other, gap))
                yield moved(rows, (rank, at), (other, gap))
        elif kind == "key":
            editing.click(editing.block(rank, at))
            key, gap = (Keys.ARROW_LEFT, at - 1) if at and chance.random() < 0.5 else (Keys.ARROW_RIGHT, at + 2)
            if gap <= len(rows[rank]):
                editing.type(Keys.ALT, key)
                yield moved(rows, (rank, at), (rank, gap))
        elif kind == "remove":
            editing.click(editing.block(rank, at))
            if chance.random() < 0.5:
                editing.type(Keys.DELETE)
            else:
                editing.press("Remove")
            yield removed(rows, rank, at)
        else:
            entry = f"{chance.randrange(3)}{chance.choice('FFBIW')}{chance.randrange(4)}"
            chip = editing.choose(entry)
            gap = chance.randrange(len(rows[rank]) + 1)
            target = editing.gap(rank, gap)
            chip = editing.choose(entry)  # where it is after scrolling
            if chance.random() < 0.5:
                editing.drag(chip, target)
            else:
                editing.click(chip)
                editing.click(target)
            yield inserted(rows, rank, gap, entry)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", some(range(5), [0]))
def test_random_edits_agree_with_verify_and_nothing_is_lost(explorer: Explorer, seed: int) -> None:
    """40 edits for each seed, since browsers keep 50 steps that can be undone."""
    editing = Editing(explorer, ranks=2, microbatches=3)
    editing.require_truth()
    first = explorer.fields
    history = [editing.rows]
    while len(history) <= 40:
        for expected in edits(editing, 100 * seed + len(history), 41 - len(history)):
            assert editing.rows == expected
            editing.require_truth()
            history.append(expected)
    fields = explorer.fields
    explorer.browser.refresh()
    assert explorer.settled().fields == fields
    editing.require_truth()
    for rows in reversed(history[:-1]):
        editing.undo()
        assert editing.rows == rows
    assert explorer.fields == first
    editing.undo()
    assert explorer.fields == {"ranks": "2", "microbatches": "3"}
    assert explorer.text("#charts h2") == "1f1b, 2 ranks, 3 microbatches"


@pytest.mark.exhaustive
def test_a_schedule_that_has_a_name_is_recognised(explorer: Explorer) -> None:
    editing = Editing(explorer, ranks=2, microbatches=3)
    assert not explorer.find("#field-ranks").is_displayed()  # the rows say how many there are
    assert "This is" in explorer.text("#status")
    assert "1f1b" in explorer.text("#status")
    assert "no order of this placement" in explorer.text("#status").lower()
    editing.press("Done")
    assert not explorer.find("#editor").is_displayed()
    assert explorer.text("#charts h2") == "custom, 2 ranks, 3 microbatches"


def test_a_deadlock_is_told_on_its_block_and_as_a_cycle(explorer: Explorer) -> None:
    editing = Editing(explorer, ranks=2, microbatches=2)
    editing.drag(editing.block(1, 1), editing.gap(1, 0))
    assert editing.rows[1][:2] == ["1B0", "1F0"]
    assert explorer.text("#cycle").count("1B0") == 2
    editing.click(editing.block(1, 0))
    editing.type(Keys.SHIFT, Keys.ARROW_RIGHT)
    editing.type(Keys.SHIFT, Keys.ARROW_LEFT)
    assert "1B0 on rank 1 needs" in explorer.text("#tip")
    assert "1B0 on rank 1 needs" in explorer.text("#spoken")
    explorer.find("#violations .link", 1).click()
    assert explorer.text("#tip h3").startswith("1F0")


@pytest.mark.exhaustive
def test_keys_reach_the_palette_and_insert_what_is_missing(explorer: Explorer) -> None:
    editing = Editing(explorer, ranks=2, microbatches=2)
    rows = editing.rows
    editing.click(editing.block(0, 3))
    editing.type(Keys.DELETE)
    assert editing.rows == removed(rows, 0, 3)
    assert len(explorer.browser.find_elements("css selector", ".wrong[data-rank='0'][data-position='']")) == 1
    assert "removed" in explorer.text("#spoken")
    editing.type(Keys.ENTER)
    assert explorer.browser.switch_to.active_element.text == rows[0][3]
    editing.type(Keys.ENTER)
    assert editing.rows == rows
    editing.require_truth()
    editing.type(Keys.ALT, Keys.ARROW_DOWN)
    assert rows[0][3] in editing.rows[1]
    editing.type(Keys.CONTROL, "z")
    assert explorer.settled().fields["rows"] == "\n".join(map(" ".join, rows))


@pytest.mark.exhaustive
def test_a_finger_drags_a_block_and_escape_gives_up(explorer: Explorer) -> None:
    editing = Editing(explorer, ranks=2, microbatches=2)
    rows = editing.rows
    start, end = editing.block(0, 0), editing.gap(0, 2)
    for kind, point in (("touchStart", start), ("touchMove", start), ("touchMove", end), ("touchEnd", None)):
        points = [{"x": round(point.x), "y": round(point.y)}] if point else []
        editing.browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    explorer.settled()
    assert editing.rows == moved(rows, (0, 0), (0, 2))
    actions = ActionBuilder(editing.browser, duration=0)
    start, end = editing.block(0, 0), editing.gap(0, 3)
    mouse: Any = actions.pointer_action
    mouse.move_to_location(*map(round, start)).pointer_down().move_to_location(*map(round, end))
    actions.perform()
    assert explorer.find(".drop").is_displayed()
    editing.type(Keys.ESCAPE)
    actions = ActionBuilder(editing.browser, duration=0)
    mouse = actions.pointer_action
    mouse.pointer_up()
    actions.perform()
    assert explorer.settled().find(".drop").is_displayed() is False
    assert editing.rows == moved(rows, (0, 0), (0, 2))


@pytest.mark.exhaustive
def test_a_schedule_can_begin_without_blocks(explorer: Explorer) -> None:
    editing = Editing(explorer, ranks=2, microbatches=2)
    rows = editing.rows
    editing.press("Empty")
    assert editing.rows == [[], []]
    editing.require_truth()
    for rank, row in enumerate(rows):
        for position, entry in enumerate(row):
            chip, target = editing.choose(entry), editing.gap(rank, position)
            chip = editing.choose(entry)
            editing.drag(chip, target)
    assert editing.rows == rows
    assert "Sound." in explorer.text("#status")
    assert "Alt and an arrow" in explorer.text("#keys")


@pytest.mark.exhaustive
def test_a_forward_and_a_backward_become_a_pair_and_two_again(explorer: Explorer) -> None:
    editing = Editing(explorer, ranks=2, microbatches=3)
    rows = editing.rows
    assert rows[0][2:4] == ["0B0", "0F2"]
    editing.click(editing.block(0, 2))
    editing.press("Pair")
    pair = "(0F2;0B0)OVERLAP_F_B"
    assert editing.rows[0] == [*rows[0][:2], pair, *rows[0][4:]]
    editing.require_truth()
    editing.type("p")
    assert editing.rows[0] == [*rows[0][:2], "0F2", "0B0", *rows[0][4:]]
    assert f"{pair} is split." in explorer.text("#spoken")
    editing.click(editing.block(0, 0))
    [button] = [each for each in explorer.browser.find_elements("css selector", "#tools button") if each.text == "Pair"]
    assert not button.is_enabled()  # two forwards


@pytest.mark.exhaustive
def test_a_search_begins_here_and_is_one_step(explorer: Explorer) -> None:
    editing = Editing(explorer, ranks=2, microbatches=3)
    editing.drag(editing.block(0, 0), editing.gap(0, 2))
    before = editing.rows
    editing.press("Search from here")
    WebDriverWait(explorer.browser, DEADLINE).until(lambda _: explorer.text("#result").startswith("Search:"))
    assert editing.rows != before
    editing.require_truth()
    editing.undo()
    assert editing.rows == before
