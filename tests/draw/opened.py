"""A page of timelines in a browser, and what a reader does with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeflow.core.timeline import Timeline
from pipeflow.draw import html
from tests.browser import webdriver

ActionChains, Keys = webdriver.ActionChains, webdriver.Keys


class Page:
    """A page that was opened, and what a reader does with it. It must not have complained in the end."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser = browser
        self.path = path

    def open(self, timelines: Timeline | Sequence[Timeline], **looks: Any) -> Page:
        self.path.write_text(html(timelines, **looks), encoding="utf-8")
        self.browser.get(self.path.as_uri())
        return self

    def find(self, selector: str, number: int = 0) -> Any:
        return self.browser.find_elements("css selector", selector)[number]

    def settled(self) -> None:
        """Waits until what was asked for is painted."""
        self.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def text(self, selector: str) -> str:
        self.settled()
        return str(self.find(selector).get_property("textContent"))

    def press(self, *keys: str) -> Page:
        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()
        return self

    def walk(self, *keys: str) -> Page:
        """From block to block."""
        for key in keys:
            ActionChains(self.browser).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()
        return self

    def place(self, timeline: Timeline, action: str, chart: int = 0) -> tuple[float, float]:
        """Where the middle of a block is, from the middle of its lanes: walks there, where it gets a frame."""
        lanes = self.find(".lanes", chart).rect
        rank, index = next(
            (rank, index)
            for rank, row in enumerate(timeline.rows)
            for index, span in enumerate(row)
            if str(span.action) == action
        )
        self.browser.execute_script("arguments[0].focus()", self.find(".lanes", chart))
        self.walk(Keys.HOME, *[Keys.ARROW_DOWN] * rank, *[Keys.ARROW_RIGHT] * index)
        assert self.text("#tip h3").startswith(action)
        frame = self.find(".focused", chart).rect
        middle = frame["x"] + frame["width"] / 2, frame["y"] + frame["height"] / 2
        return middle[0] - lanes["x"] - lanes["width"] / 2, middle[1] - lanes["y"] - lanes["height"] / 2

    def point(self, x: float, y: float, chart: int = 0) -> Any:
        return ActionChains(self.browser).move_to_element_with_offset(self.find(".lanes", chart), round(x), round(y))

    def double_click(self) -> None:
        """In the middle of the lanes, however long a busy machine takes between the clicks."""
        box = self.find(".lanes").rect
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left"}
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                event = {**place, "type": kind, "clickCount": count}
                self.browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def seen(self) -> tuple[float, float]:
        """The times that the lanes show."""
        first, last = re.findall(r"-?[\d.]+(?:e-?\d+)?", self.text("#view"))[:2]
        return float(first), float(last)

    def picture(self, chart: int = 0) -> str:
        self.settled()
        return str(self.browser.execute_script("return arguments[0].toDataURL()", self.find(".lanes", chart)))

    def colour(self, x: float, y: float) -> list[int]:
        """Of the lanes, beside the number of the block in whose middle `x` and `y` are."""
        self.settled()
        script = """
            const [lanes, x, y] = arguments;
            const copy = Object.assign(document.createElement("canvas"), {width: lanes.width, height: lanes.height});
            const context = copy.getContext("2d", {willReadFrequently: true});
            context.drawImage(lanes, 0, 0);
            const scale = lanes.width / lanes.clientWidth;
            const [left, top] = [lanes.clientWidth / 2 + x, lanes.clientHeight / 2 + y - 7];
            return [...context.getImageData(left * scale, top * scale, 1, 1).data];"""
        found: list[int] = self.browser.execute_script(script, self.find(".lanes"), x, y)
        return found[:3]
