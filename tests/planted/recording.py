"""A plugin of pytest that records which lines of the package each test runs, and how long it takes: in threads, and in
the processes that run_processes forks. `python -m tests.planted` reads it.

    COVERED=folder python -m pytest -p tests.planted.recording
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

import coverage
import pytest

FOLDER = Path(os.environ.get("COVERED", "."))


def _measurement() -> coverage.Coverage:
    """Of this process, in a file of its own."""
    found = coverage.Coverage(
        data_file=str(FOLDER / f"{os.getpid()}.lines"), source_pkgs=["pipeflow"], config_file=False
    )
    found.set_option("run:disable_warnings", ["module-not-measured", "no-data-collected"])  # they are errors in pytest
    found.start()
    return found


def _in_a_fork() -> None:
    """In a process that the server of forks has made: its lines belong to the test that runs in the server's parent."""
    current = FOLDER / f"{PARENT}.test"
    if os.getppid() == SERVER and current.exists():
        measured = _measurement()
        measured.switch_context(current.read_text(encoding="utf-8"))
        util.Finalize(None, measured.stop, exitpriority=100)
        util.Finalize(None, measured.save, exitpriority=99)


SERVER, PARENT = os.getpid(), os.getppid()
os.register_at_fork(after_in_child=_in_a_fork)


class Recording:
    def __init__(self) -> None:
        self.measured = _measurement()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        (FOLDER / f"{os.getpid()}.test").write_text(item.nodeid, encoding="utf-8")
        self.measured.switch_context(item.nodeid)
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        with (FOLDER / f"{os.getpid()}.times").open("a", encoding="utf-8") as file:
            print(json.dumps([item.nodeid, round(seconds, 3)]), file=file)

    def pytest_sessionfinish(self) -> None:
        self.measured.stop()
        self.measured.save()


def pytest_configure(config: pytest.Config) -> None:
    from pipeflow.testing import ranks

    ranks.PRELOADED.append(__name__)
    config.pluginmanager.register(Recording())
