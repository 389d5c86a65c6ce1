"""What is slow follows where it can: exhaustive tests and drills, those in a browser, and what is run by processes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

from tests.covering import LEFT_OUT, spaced

settings.register_profile("pipeflow", deadline=None)  # no test asserts a time
settings.load_profile("pipeflow")

collect_ignore = ["core/spilling.py"]  # a program, for a package with more kinds of action


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="I/N", help="run one of N shares of the exhaustive tests: 0/N to N-1/N")
    parser.addoption("--turns", metavar="N", type=int, default=3, help="turns of each drill, with other random choices")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "turn" in metafunc.fixturenames:
        metafunc.parametrize("turn", range(metafunc.config.getoption("--turns")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_left_out(config, items)
    _mark_slow(items)
    _mark_some(items)
    _preload()
    if config.getoption("--share"):
        share, shares = map(int, config.getoption("--share").split("/"))
        whole = [item for item in items if item.get_closest_marker("exhaustive")]
        others = [item for item in whole if crc32(item.nodeid.encode()) % shares != share]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _mark_left_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves to `make test-all` the tests, or cases, of the list that `python -m tests.planted choose` writes."""
    if config.pluginmanager.has_plugin("tests.planted.recording"):
        return  # which measures them, too
    listed = set(LEFT_OUT.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in listed or item.nodeid.partition("[")[0] in listed:
            item.add_marker(pytest.mark.exhaustive)


def _mark_slow(items: list[pytest.Item]) -> None:
    """Marks what is slow by nature: exhaustive tests and drills, and what runs in a browser or by processes."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        by_processes = any(getattr(value, "__name__", "") == "run_processes" for value in parameters.values())
        if by_processes or any(item.get_closest_marker(name) for name in ("exhaustive", "drill", "browser")):
            item.add_marker(pytest.mark.slow)


def _mark_some(items: list[pytest.Item]) -> None:
    """Leaves to `make test` as many cases of a test as its mark `some` says, evenly spaced, and one slow case of a test
    without that mark. The others become exhaustive.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("exhaustive") and (
            item.get_closest_marker("some") or item.get_closest_marker("slow")
        ):
            cases[item.nodeid.partition("[")[0]].append(item)
    for every in cases.values():
        marker = every[0].get_closest_marker("some")
        kept = spaced(marker.args[0] if marker else 1, len(every))
        for place, item in enumerate(every):
            if place not in kept:
                item.add_marker(pytest.mark.exhaustive)
                item.add_marker(pytest.mark.slow)


IMPORTS = ["pipeflow.training", "pipeflow.training.checkpoint.save"]
IMPORTS_WITH_TRANSFORMERS = [
    "pipeflow.colossalai.boosters",
    "pipeflow.adapters.huggingface.trainer",
    "tests.stages.families",
]


def _preload() -> None:
    """The server that forks the ranks of tests imports once what each of them would import anew."""
    if ranks := sys.modules.get("pipeflow.testing.ranks"):
        vars(ranks)["PRELOADED"].extend(IMPORTS)
        vars(ranks)["PRELOADED"].extend(IMPORTS_WITH_TRANSFORMERS if "transformers" in sys.modules else [])


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One for all tests of this process, since it starts slowly."""
    from tests.browser import chromium

    yield from chromium(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def browser(chrome: Any) -> Iterator[Any]:
    """With a new tab, which has its own history and emulations."""
    first = chrome.current_window_handle
    chrome.switch_to.new_window("tab")
    yield chrome
    chrome.close()
    chrome.switch_to.window(first)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Compiled code, and torch's counters of it, are of one test."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    counters.clear()
    yield
    torch._dynamo.reset()
