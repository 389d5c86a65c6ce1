"""ColossalAI's cluster: who runs what first."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pipeflow.colossalai.cluster import DistCoordinator
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_threads
from pipeflow.testing.ranks import RankError


def coordinated() -> Any:
    coordinator, times = DistCoordinator(), []
    assert (coordinator.rank, coordinator.world_size) == (current_context().rank, 3)
    with coordinator.priority_execution(executor_rank=1):
        times.append(time.monotonic())
        time.sleep(0.05 if coordinator.rank == 1 else 0.0)
        times.append(time.monotonic())
    coordinator.block_all()
    only = coordinator.on_master_only()(lambda number: number + 1)
    return times, only(4), coordinator.is_master(), coordinator.is_last_process()


def test_one_rank_goes_first(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = run_threads(coordinated, 3)
    assert second[0][1] <= min(first[0][0], third[0][0])
    assert first[1:] == (5, True, False)
    assert second[1:] == (None, False, False)
    assert third[1:] == (None, False, True)
    run_threads(lambda: DistCoordinator().print_on_master("once"), 2)
    assert capsys.readouterr().out == "once\n"


def test_a_rank_that_fails_first_is_named() -> None:
    def rank() -> None:
        with DistCoordinator().priority_execution():
            if current_context().rank == 0:
                raise ValueError("on purpose")

    with pytest.raises(RankError, match="PipelineError: rank 0 failed: its thread ended"):
        run_threads(rank, 2)


def test_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for local, printed in (("", "here\n"), ("0", "here\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local)
        assert DistCoordinator().is_node_master() == bool(printed)
        DistCoordinator().print_on_node_master("here")
        assert capsys.readouterr().out == printed
