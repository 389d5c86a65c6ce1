"""Graphs on the second device, where a backward runs on another thread than its forward: a stand-in records them."""

from __future__ import annotations

from functools import partial

import pytest

from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes
from tests.runtime.recorder import recorders
from tests.runtime.test_recorded import Ignoring, between, of_model, same
from tests.runtime.work import schedule_of
from tests.second.device import NAME
from tests.second.ranks import on_second_device

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def steps() -> None:
    """Compares what steps leave with graphs and without."""
    with recorders() as counted:
        for run in (partial(of_model, Ignoring(), schedule_of(("zb-v", 2, 2), 4), False, {}), between):
            assert same(run(True), run(False))
            assert counted["replays"] >= 4 * counted["graphs"] > 0
            counted.clear()
    assert current_context().device.type == NAME


def test_the_second_device_replays() -> None:
    run_processes(on_second_device, 2, steps, deadline=200.0)
