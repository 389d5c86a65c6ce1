"""What is slow follows where it can: exhaustive tests are, and so is what is run by processes."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        by_processes = any(getattr(value, "__name__", "") == "run_processes" for value in values)
        if by_processes or item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)
