from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pipeflow.tools.explore.server import Server
from tests.explore.explorer import Explorer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def explorer(browser: Any, server: Server) -> Iterator[Explorer]:
    explorer = Explorer(browser, server)
    explorer.complaints()  # of the test before
    yield explorer
    assert explorer.complaints() == []
