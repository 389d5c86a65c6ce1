"""Fixtures of tests that need a browser. What needs selenium is imported when it is used: other tests here do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.draw.opened import Page


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Page]:
    from tests.draw.opened import Page

    yield Page(browser, tmp_path / "page.html")
    assert browser.get_log("browser") == []
