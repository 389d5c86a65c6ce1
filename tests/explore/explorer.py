"""The explorer in a browser, as a reader uses it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from selenium.webdriver.support.wait import WebDriverWait

from pipeflow.tools.explore.server import Server
from tests.browser import DEADLINE

SETTLED = "return !document.documentElement.hasAttribute('data-asking') && document.querySelector('.chart') !== null"


@contextmanager
def serving(**options: Any) -> Iterator[Server]:
    """A server of the explorer that runs in a thread."""
    with Server(**options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Explorer:
    """The explorer's page. It must not have complained in the end."""

    def __init__(self, browser: Any, server: Server) -> None:
        self.browser = browser
        self.server = server

    def open(self, **fields: object) -> Explorer:
        """Opens a link with these fields, as in a new tab."""
        self.browser.get("about:blank")
        self.browser.get(f"{self.server.url}#{urlencode(fields)}")
        return self.settled()

    def settled(self) -> Explorer:
        """Waits until all questions are answered and painted."""
        WebDriverWait(self.browser, DEADLINE, poll_frequency=0.01).until(
            lambda browser: browser.execute_script(SETTLED)
        )
        self.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        return self

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the page's address."""
        return dict(parse_qsl(urlsplit(self.browser.current_url).fragment, keep_blank_values=True))

    def find(self, selector: str, number: int = 0) -> Any:
        """An element."""
        return self.browser.find_elements("css selector", selector)[number]

    def text(self, selector: str, number: int = 0) -> str:
        """The text of an element."""
        return self.texts(selector, visible=False)[number]

    def texts(self, selector: str, *, visible: bool = True) -> list[str]:
        """The texts of all elements that match, read at once: an answer that comes meanwhile replaces none of them."""
        read = "innerText" if visible else "textContent"
        script = f"return [...document.querySelectorAll(arguments[0])].map((each) => each.{read})"
        return [str(text) for text in self.settled().browser.execute_script(script, selector)]

    def set(self, name: str, value: object, *, moving: bool = False) -> Explorer:
        """Sets the control of a field; while `moving`, as a slider that is dragged."""
        script = (
            "const [id, value, event] = arguments; const box = document.getElementById(id);"
            "const input = event === 'input' ? box.parentElement.querySelector('[type=range]') : box;"
            "input.value = value; input.dispatchEvent(new Event(event))"
        )
        self.browser.execute_script(script, f"field-{name}", str(value), "input" if moving else "change")
        return self.settled()

    def unfold(self) -> Explorer:
        """Opens all parts of the form."""
        script = "document.querySelectorAll('#controls details').forEach((each) => { each.open = true; })"
        self.browser.execute_script(script)
        return self

    def complaints(self) -> list[str]:
        """What the browser logged."""
        return [entry["message"] for entry in self.browser.get_log("browser")]
