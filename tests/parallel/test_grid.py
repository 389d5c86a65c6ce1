"""Where tensor ranks lie on a grid, and which sizes have one."""

from __future__ import annotations

from itertools import product

import pytest

from pipeflow import UsageError, launch
from pipeflow.engine.parallel.grid import Grid, grid_of
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.training import read_config

GRIDS = [Grid(2, 2), Grid(3, 2), Grid(2, 3), Grid(3, 3)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_has_a_place_of_its_own(grid: Grid) -> None:
    places = [grid.place(rank) for rank in range(grid.size)]
    assert places == [*product(range(grid.side), repeat=grid.axes)]
    for rank, place in enumerate(places):
        for axis in range(grid.axes):
            line = grid.ranks(rank, axis)
            assert line[place[axis]] == rank
            assert all(
                [*places[each][:axis], *places[each][axis + 1 :]] == [*place[:axis], *place[axis + 1 :]]
                for each in line
            )
        samples = {grid.index(each, grid.sample_axes): grid.place(each)[1] for each in grid.peers(rank)}
        assert samples == dict.fromkeys(range(grid.sample_parts), place[1])


LAYOUTS = [
    WorldLayout.of(16, 2, 4, tensor_mode="2d"),
    WorldLayout.of(32, 2, 8, tensor_mode="2.5d", tensor_depth=2),
    WorldLayout.of(32, 2, 8, tensor_mode="3d"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.tensor_mode)
def test_each_part_of_a_batch_is_computed_by_the_ranks_of_one_loss(layout: WorldLayout) -> None:
    """And the ranks whose losses make up that of all replicas have each part once."""
    assert (layout.data, layout.pipeline) == (2, 2)
    for rank in range(layout.world_size):
        assert layout.rank(layout.place(rank)) == rank
        model, losses = layout.model_ranks(rank), layout.loss_ranks(rank)
        assert rank in model
        assert {layout.sample_part(each) for each in model} == {layout.sample_part(rank)}
        assert len(model) * layout.sample_parts == len(layout.replica_ranks(rank))
        parts = [(layout.place(each).data, layout.sample_part(each)) for each in losses]
        assert parts == [*product(range(2), range(layout.sample_parts))]
        assert losses[parts.index((layout.place(rank).data, layout.sample_part(rank)))] == rank
        copies = layout.copy_ranks(rank)
        assert {layout.place(each)[1:3] for each in copies} == {layout.place(rank)[1:3]}
        assert len(copies) == layout.data * layout.depth


@pytest.mark.parametrize(
    ("mode", "size", "depth", "said"),
    [
        ("4d", 4, 1, "tensor_mode must be '1d', '2d', '2.5d', '3d', got '4d'"),
        ("2d", 8, 1, "tensor_mode='2d' needs a square of tensor ranks such as 4 or 9, got tensor=8"),
        ("3d", 4, 1, "tensor_mode='3d' needs a cube of tensor ranks, such as 8 or 27, got tensor=4"),
        ("2.5d", 4, 2, "tensor_mode='2.5d' needs r x r x 2 .* tensor_depth=2, such as 8 or 18, got tensor=4"),
        ("2.5d", 2, 2, "such as 8 or 18, got tensor=2"),  # r = 1: that is data=2
        ("2d", 4, 2, "tensor_depth=2 belongs to tensor_mode='2.5d', got '2d': leave tensor_depth out"),
        ("2d", 4, 0, "tensor_depth must be"),
    ],
)
def test_sizes_without_a_grid_are_refused(mode: str, size: int, depth: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        launch(tensor=size, tensor_mode=mode, tensor_depth=depth)


def test_context_ranks_share_no_grid() -> None:
    with pytest.raises(UsageError, match="'2d' divides samples, and context=2 tokens"):
        WorldLayout.of(8, 1, 4, 2, tensor_mode="2d")


def test_one_rank_is_no_grid() -> None:
    assert grid_of("2d", 1) is grid_of("3d", 1) is grid_of("1d", 4) is None
    assert grid_of("3d", 27) == Grid(3, 3)


def test_a_configuration_says_the_mode() -> None:
    config = read_config({"parallel": {"pipeline": 2, "tensor": {"mode": "2.5d", "size": 8, "depth": 2}}})
    assert (config.tensor, config.tensor_mode, config.tensor_depth) == (8, "2.5d", 2)
    assert config.layout() == WorldLayout(pipeline=2, tensor=4, depth=2, grid=Grid(2, 2))
    assert config.layout(32).data == 2


def test_a_configuration_has_as_many_replicas_as_expert_ranks() -> None:
    config = read_config({"parallel": {"pipeline": 2, "experts": 4}})
    assert config.layout() == WorldLayout(pipeline=2, data=4, experts=4)
