"""What is slow follows where it can: exhaustive tests are, those in a browser, and what is run by processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("pipeflow", deadline=None)  # no test asserts a time
settings.load_profile("pipeflow")

collect_ignore = ["core/offloading.py"]  # a program, for a package with more kinds of action


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        by_processes = any(getattr(value, "__name__", "") == "run_processes" for value in parameters.values())
        if by_processes or any(item.get_closest_marker(name) for name in ("exhaustive", "browser")):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Compiled code, and torch's counters of it, are of one test."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    counters.clear()
    yield
    torch._dynamo.reset()
