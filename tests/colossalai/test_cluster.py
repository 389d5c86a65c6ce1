"""ColossalAI's cluster: who runs what first, and groups along the axes of a grid of processes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from pipeflow.colossalai.cluster import DistCoordinator, ProcessGroupMesh
from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import current_context
from pipeflow.testing import run_processes, run_threads
from pipeflow.testing.ranks import RankError


def test_places_in_a_mesh() -> None:
    def rank() -> Any:
        mesh = ProcessGroupMesh(1, 2, 2)
        assert (mesh.shape, mesh.size(), mesh.size(1)) == ((1, 2, 2), (1, 2, 2), 2)
        return mesh.rank, mesh.coordinate(), mesh.coordinate(-1)

    assert run_threads(rank, 4) == [(0, (0, 0, 0), 0), (1, (0, 0, 1), 1), (2, (0, 1, 0), 0), (3, (0, 1, 1), 1)]


def test_places_and_ranks() -> None:
    shape = (2, 3, 4)
    for rank in range(24):
        assert ProcessGroupMesh.ravel(ProcessGroupMesh.unravel(rank, shape), shape) == rank
    assert ProcessGroupMesh.unravel(17, shape) == (1, 1, 1)
    assert ProcessGroupMesh.ravel((2, -1, 5), shape, "wrap") == ProcessGroupMesh.ravel((0, 2, 1), shape)
    assert ProcessGroupMesh.ravel((2, -1, 5), shape, "clip") == ProcessGroupMesh.ravel((1, 0, 3), shape)
    with pytest.raises(UsageError, match=r"no rank at \(2, 0, 0\) of a mesh of 2 x 3 x 4"):
        ProcessGroupMesh.ravel((2, 0, 0), shape)
    with pytest.raises(UsageError, match="mode must be"):
        ProcessGroupMesh.ravel((0, 0, 0), shape, "round")
    along = ProcessGroupMesh.get_coords_along_axis
    assert along((1, 0, 2), 1, [0, 2]) == [(1, 0, 2), (1, 2, 2)]
    assert along((1, 0, 2), [0, 2], [[0, 1], [3]]) == [(0, 0, 3), (1, 0, 3)]


def test_a_mesh_has_every_process() -> None:
    def rank() -> None:
        with pytest.raises(UsageError, match="a mesh of 2 x 2 does not have 2 processes"):
            ProcessGroupMesh(2, 2)

    run_threads(rank, 2)


def groups() -> Any:
    mesh = ProcessGroupMesh(2, 2)
    found = [mesh.get_group_along_axis(0), mesh.create_group_along_axis(1), mesh.get_group_along_axis([0, 1])]
    assert mesh.get_group_along_axis(0) is found[0]
    some = mesh.get_group_along_axis(1, [1])
    assert (some is None) == (mesh.coordinate(1) == 0)
    told = [mesh.get_ranks_in_group(group) for group in found if group is not None]
    total = dist.get_world_size(found[0])
    mesh.destroy_mesh_process_groups()
    return told, total


@pytest.mark.slow
def test_groups_along_axes() -> None:
    lines = [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]
    assert run_processes(groups, 4) == [([*each, [0, 1, 2, 3]], 2) for each in lines]


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
