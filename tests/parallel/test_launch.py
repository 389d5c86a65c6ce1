"""Layouts of a world, and a process that is launched more than once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeflow import Pipeline, UsageError, launch, make_schedule
from pipeflow.engine.parallel.context import current_context, is_launched
from pipeflow.engine.parallel.layout import Coordinates, WorldLayout
from pipeflow.testing import run_processes
from pipeflow.testing.ranks import free_port

SIZES = st.integers(1, 5)


@given(SIZES, SIZES, SIZES, SIZES)
def test_every_rank_has_a_place_of_its_own(pipeline: int, tensor: int, data: int, context: int) -> None:
    layout = WorldLayout(pipeline, tensor, data, context)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    grid = product(range(data), range(pipeline), range(context), range(tensor))
    assert places == [Coordinates(d, p, t, c) for d, p, c, t in grid]
    for rank, place in enumerate(places):
        assert layout.rank(place) == rank
        assert layout.tensor_ranks(rank)[place.tensor] == rank
        assert layout.pipeline_ranks(rank)[place.pipeline] == rank
        assert layout.data_ranks(rank)[place.data] == rank
        assert layout.context_ranks(rank)[place.context] == rank
        assert layout.copy_ranks(rank)[place.data * context + place.context] == rank
        assert rank in layout.model_ranks(rank)
        assert len(layout.model_ranks(rank)) == pipeline * tensor


def test_tensor_ranks_are_neighbours_and_replicas_lie_farthest() -> None:
    layout = WorldLayout.of(8, pipeline=2, tensor=2)
    assert (layout.tensor_ranks(5), layout.pipeline_ranks(5), layout.data_ranks(5)) == ((4, 5), (5, 7), (1, 5))
    layout = WorldLayout.of(16, pipeline=2, tensor=2, context=2)
    assert (layout.tensor_ranks(9), layout.context_ranks(9), layout.pipeline_ranks(9)) == ((8, 9), (9, 11), (9, 13))
    assert (layout.data_ranks(9), layout.copy_ranks(9)) == ((1, 9), (1, 3, 9, 11))
    assert layout.model_ranks(9) == (8, 9, 12, 13)
    assert [*layout.replica_ranks(9)] == [*range(8, 16)]


def test_an_unknown_way_of_attention_over_context_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="context_attention must be 'gather' or 'ring' or 'all_to_all', got 'rings'"):
        launch(context_attention="rings")


def test_what_is_not_said_is_pipeline() -> None:
    assert WorldLayout.of(8, tensor=2) == WorldLayout(pipeline=4, tensor=2, data=1)
    with pytest.raises(UsageError, match=r"6 processes is not divisible into replicas of 4 \(pipeline 2 x tensor 2\)"):
        WorldLayout.of(6, pipeline=2, tensor=2)
    with pytest.raises(UsageError, match=r"a world of 2 .* replicas of 4"):
        WorldLayout.of(2, tensor=4)


def mesh_over_context() -> tuple[Any, ...]:
    context = current_context()
    return context.mesh.mesh_dim_names, tuple(context.mesh.get_coordinate() or ())


@pytest.mark.slow
def test_a_mesh_has_context_ranks_if_there_are_several() -> None:
    found = run_processes(mesh_over_context, 4, context=2)
    assert {names for names, _ in found} == {("data", "pipeline", "context", "tensor")}
    assert [place for _, place in found] == [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (0, 1, 1, 0)]


def launch_again() -> list[tuple[int, int, int, float]]:
    """Under one layout after the other, with a sum over the tensor ranks in each; the mesh tells the same places."""
    seen = []
    for pipeline, tensor in ((4, 1), (1, 4), (2, 2), (1, 2)):
        if is_launched():
            current_context().close()
            assert not is_launched()
        context = launch(pipeline=pipeline, tensor=tensor, timeout=20)
        total = torch.ones(1)
        context.tensor.all_reduce(total).wait()
        place = (context.data_rank, context.pipeline_rank, context.tensor_rank)
        assert tuple(context.mesh.get_coordinate() or ()) == place
        seen.append((context.pipeline_size, context.tensor_size, context.data_size, total.item()))
    return seen


@pytest.mark.exhaustive
def test_a_process_may_be_launched_again() -> None:
    for seen in run_processes(launch_again, 4):
        assert seen == [(4, 1, 1, 1), (1, 4, 1, 4), (2, 2, 1, 2), (1, 2, 2, 2)]


def serve_again(folder: str) -> list[bool]:
    """Launches, loads all that a Pipeline needs, and leaves nothing of torch's behind; twice, with rank 0 later."""
    served = []
    current_context().close()
    for turn in range(2):
        if dist.is_initialized():
            dist.destroy_process_group()
        context = launch(timeout=20)
        served.append(Pipeline(nn.Linear(2, 2), make_schedule("1f1b", ranks=2, microbatches=2)) is not None)
        context.close()
        Path(folder, f"{turn}-{context.rank}").touch()
        while context.rank == 0 and turn == 0 and not Path(folder, "0-1").exists():
            time.sleep(0.05)
        if context.rank == 0:
            time.sleep(0.3)  # rank 1 finds the store of the first launch
    return served


@pytest.mark.exhaustive
def test_a_store_may_be_served_again_on_its_port(tmp_path: Path) -> None:
    assert run_processes(serve_again, 2, str(tmp_path)) == [[True] * 2] * 2


LEAVING = """
import os
from pipeflow import PipelineError, launch
from pipeflow.engine.parallel.rendezvous import find_each_other
if os.environ["RANK"] == "1":
    find_each_other(1, 3, 30.0)
    os._exit(0)
try:
    launch(timeout=3)
except PipelineError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_rank_that_leaves_between_the_rendezvous_and_torchs_group_is_named() -> None:
    """torch's group holds the interpreter while it connects, so its own timeout must be that of launch."""
    shared = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVING],
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        told = [each.communicate(timeout=60)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert told[1] == ""
    for text in (told[0], told[2]):
        assert "rank 1 failed: it did not join within 3 s of launch" in text
