"""Grid: tensor ranks as a square or a cube, of which rows of ranks compute collectives together. The modes of tensor
parallelism that launches take. Must not contain: what layers compute with a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.transport.protocol import Group, Transport

MODES = ("1d", "2d", "2.5d", "3d")


@dataclass(frozen=True, slots=True)
class Grid:
    """A square (2 axes) or a cube (3 axes) of tensor ranks, counted with the last axis fastest.

    Between two layers, axis 1 divides the features of activations, and the other axes divide their samples.

    Attributes:
        side: number of ranks along each axis.
        axes: number of axes.

    >>> Grid(2, 2).ranks(1, axis=0)
    (1, 3)
    """

    side: int
    axes: int

    FEATURES = 1  # the axis that divides features

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.side**self.axes)

    @property
    def sample_axes(self) -> tuple[int, ...]:
        """The axes that divide samples, the outermost first."""
        return (0,) if self.axes == 2 else (0, 2)

    @property
    def sample_parts(self) -> int:
        """The number of parts into which the samples of a batch are divided."""
        return int(self.side ** len(self.sample_axes))

    def place(self, rank: int) -> tuple[int, ...]:
        """The index of tensor rank `rank` along each axis."""
        return tuple(rank // self.side ** (self.axes - 1 - axis) % self.side for axis in range(self.axes))

    def index(self, rank: int, axes: Sequence[int]) -> int:
        """The index of tensor rank `rank` along several axes together, of which the first is the outermost."""
        found, place = 0, self.place(rank)
        for axis in axes:
            found = found * self.side + place[axis]
        return found

    def ranks(self, rank: int, axis: int) -> tuple[int, ...]:
        """The tensor ranks on the line through tensor rank `rank` along `axis`."""
        stride = self.side ** (self.axes - 1 - axis)
        first = rank - self.place(rank)[axis] * stride
        return tuple(range(first, first + self.side * stride, stride))

    def places(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The `index` of every tensor rank along `axes`, in rank order."""
        return tuple(self.index(rank, axes) for rank in range(self.size))

    def peers(self, rank: int) -> tuple[int, ...]:
        """The tensor ranks whose features are those of tensor rank `rank`: one for each part of the samples."""
        mine = self.place(rank)[self.FEATURES]
        return tuple(each for each in range(self.size) if self.place(each)[self.FEATURES] == mine)


class GridGroups:
    """The groups of one rank in a grid.

    Attributes:
        grid: the grid.
        rank: this rank's index among the tensor ranks.
        along: the group of the line through this rank along each axis.
    """

    def __init__(self, grid: Grid, rank: int, along: Sequence[Group]) -> None:
        self.grid, self.rank, self.along = grid, rank, tuple(along)

    @classmethod
    def of(cls, grid: Grid, world: Transport, tensor_ranks: Sequence[int]) -> GridGroups:
        """The groups of the rank of `world`, which is one of the world ranks `tensor_ranks`."""
        rank = tensor_ranks.index(world.rank)
        lines = (grid.ranks(rank, axis) for axis in range(grid.axes))
        return cls(grid, rank, [world.group([tensor_ranks[each] for each in line]) for line in lines])

    @property
    def features(self) -> Group:
        """The ranks with the same samples, which hold the other features."""
        return self.along[Grid.FEATURES]


def grid_of(mode: str, size: int, depth: int = 1) -> Grid | None:
    """The grid of `size` tensor ranks; None in mode "1d", and for one rank. In mode "2.5d" it is that of one of `depth`
    layers, which hold the same weights.

    >>> grid_of("2.5d", 8, depth=2)
    Grid(side=2, axes=2)

    Raises UsageError for another mode, and for sizes that have no such grid.
    """
    if mode not in MODES:
        raise UsageError(f"tensor_mode must be {', '.join(map(repr, MODES))}, got {mode!r}")
    if mode != "2.5d" and depth != 1:
        raise UsageError(f"tensor_depth={depth} belongs to tensor_mode='2.5d', got {mode!r}: leave tensor_depth out")
    if mode == "1d" or (size == 1 and depth == 1):
        return None
    if mode == "3d":
        side = round(size ** (1 / 3))
        if side**3 != size:
            raise UsageError(f"tensor_mode='3d' needs a cube of tensor ranks, such as {_near(3, 1)}, got tensor={size}")
        return Grid(side, 3)
    side = isqrt(max(0, size // max(1, depth)))
    if depth < 1 or side * side * depth != size or side < 2:
        kind = (
            "a square of tensor ranks" if mode == "2d" else f"r x r x {depth} tensor ranks, for tensor_depth={depth},"
        )
        raise UsageError(f"tensor_mode={mode!r} needs {kind} such as {_near(2, max(1, depth))}, got tensor={size}")
    return Grid(side, 2)


def _near(power: int, depth: int) -> str:
    """The two smallest sizes that fit."""
    return " or ".join(str(side**power * depth) for side in (2, 3))
