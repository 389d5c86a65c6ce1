"""WorldLayout: maps ranks of the world to coordinates. Tensor ranks are neighbours, then come context ranks, the ranks
of a pipeline and the replicas, of which neighbours are expert ranks. Must not contain: connections between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive
from pipeflow.engine.parallel.grid import Grid, grid_of


class Coordinates(NamedTuple):
    """One process's index along each dimension of a layout."""

    data: int
    pipeline: int
    tensor: int
    context: int = 0
    depth: int = 0


@dataclass(frozen=True, slots=True)
class WorldLayout:
    """The sizes of a world: `data` replicas of a pipeline of `pipeline` ranks, each of which is `depth` x `context` x
    `tensor` processes.

    Attributes:
        pipeline: number of ranks in a pipeline.
        tensor: number of processes that share every layer; in tensor mode "2.5d", those of one layer of depth.
        data: number of replicas.
        context: number of processes that hold the same weights and share the tokens of each sequence.
        experts: number of replicas, next to each other, among which the experts of a layer are divided.
        depth: number of processes that hold the same weights and share the samples of each batch, as in mode "2.5d".
        grid: how tensor ranks form a square or a cube; None in mode "1d".

    Raises UsageError for a size that is not positive, and if `experts` does not divide `data`.

    >>> WorldLayout(pipeline=2, tensor=2, data=2).place(5)
    Coordinates(data=1, pipeline=0, tensor=1, context=0, depth=0)
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    context: int = 1
    experts: int = 1
    depth: int = 1
    grid: Grid | None = None

    def __post_init__(self) -> None:
        sizes = {"pipeline": self.pipeline, "tensor": self.tensor, "data": self.data, "context": self.context}
        require_positive(**sizes, experts=self.experts, depth=self.depth)
        if self.data % self.experts:
            multiple = self.world_size // self.data * self.experts
            raise UsageError(
                f"{self.experts} expert ranks do not divide the {self.data} replicas, among which they are: choose a "
                f"divisor of {self.data}, or start a multiple of {multiple} processes"
            )

    @classmethod
    def of(
        cls,
        world_size: int,
        pipeline: int | None = None,
        tensor: int = 1,
        context: int = 1,
        experts: int = 1,
        *,
        tensor_mode: str = "1d",
        tensor_depth: int = 1,
    ) -> WorldLayout:
        """The layout of a world of `world_size` processes, with as many replicas as fit. By default there are as many
        replicas as expert ranks, so one without these, and a pipeline through all processes. `tensor_mode` and
        `tensor_depth` are as in `launch`.

        Raises UsageError if `world_size` is not a multiple of the size of one replica, and for expert ranks that do not
        divide the replicas. Also raises it if the tensor ranks do not form such a grid, and for a grid with context or
        expert ranks.
        """
        require_positive(tensor=tensor, context=context, experts=experts, tensor_depth=tensor_depth)
        grid = grid_of(tensor_mode, tensor, tensor_depth)
        for name, number, divided in (("context", context, "tokens"), ("experts", experts, "experts")):
            if grid is not None and number > 1:
                raise UsageError(
                    f"tensor_mode={tensor_mode!r} divides samples, and {name}={number} {divided}, which does not go "
                    f"together: launch with {name}=1, or with tensor_mode='1d'"
                )
        pipeline = max(1, world_size // (tensor * context * experts)) if pipeline is None else pipeline
        require_positive(pipeline=pipeline)
        one = pipeline * tensor * context
        if world_size % one:
            others = f" x context {context}" * (context > 1) + f" x tensor {tensor}" * (tensor > 1)
            raise UsageError(
                f"a world of {world_size} processes is not divisible into replicas of {one} (pipeline {pipeline}"
                f"{others}): start a multiple of {one} processes, as with torchrun --nproc-per-node {one}"
            )
        return cls(pipeline, tensor // tensor_depth, world_size // one, context, experts, tensor_depth, grid)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tensor * self.data * self.context * self.depth

    def place(self, rank: int) -> Coordinates:
        """The place of world rank `rank`."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        rest, depth = divmod(rest, self.depth)
        return Coordinates(*divmod(rest, self.pipeline), tensor, context, depth)

    def rank(self, place: Coordinates) -> int:
        """The rank in the world of the process at `place`."""
        stage = (place.data * self.pipeline + place.pipeline) * self.depth + place.depth
        return (stage * self.context + place.context) * self.tensor + place.tensor

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks in the same pipeline as `rank`, in pipeline order."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(pipeline=index)) for index in range(self.pipeline))

    def replica_ranks(self, rank: int) -> range:
        """The world ranks of the same replica as `rank`, which read the same batches."""
        size = self.pipeline * self.depth * self.context * self.tensor
        return range(rank // size * size, (rank // size + 1) * size)

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks that hold the parts of the same layers as `rank`."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(tensor=index)) for index in range(self.tensor))

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks that have the place of `rank` in their replica, one per replica."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(data=index)) for index in range(self.data))

    def context_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks that hold the other tokens of the same sequences as `rank`, for the same weights."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(context=index)) for index in range(self.context))

    def depth_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks that hold the same weights as `rank` for other samples of the same batches."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(depth=index)) for index in range(self.depth))

    def copy_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks that hold the same weights as `rank`: the context ranks, and those of all layers of depth, of
        every replica.
        """
        ranks = (each for first in self.data_ranks(rank) for each in self.depth_ranks(first))
        return tuple(each for first in ranks for each in self.context_ranks(first))

    def loss_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks with the other parts of all samples and tokens of a batch, over all replicas, each part once:
        the `copy_ranks`, and those that hold the same features in their grids.
        """
        place = self.place(rank)
        tensor = [place.tensor] if self.grid is None else self.grid.peers(place.tensor)
        first = self.rank(place._replace(tensor=0))
        return tuple(each + index for each in self.copy_ranks(first) for index in tensor)

    @property
    def tensor_mode(self) -> str:
        """The mode of tensor parallelism, as in `launch`."""
        if self.grid is None:
            return "1d"
        return "3d" if self.grid.axes == 3 else "2d" if self.depth == 1 else "2.5d"

    @property
    def sample_parts(self) -> int:
        """The number of parts into which the ranks of one replica divide the samples of a batch."""
        return self.depth * (1 if self.grid is None else self.grid.sample_parts)

    def sample_part(self, rank: int) -> int:
        """Which of these parts `rank` computes."""
        place = self.place(rank)
        if self.grid is None:
            return place.depth
        return place.depth * self.grid.sample_parts + self.grid.index(place.tensor, self.grid.sample_axes)

    def expert_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks among which the experts are divided that `rank` has some of: the ranks with its place in
        neighbouring replicas.
        """
        first = self.place(rank).data // self.experts * self.experts
        return self.data_ranks(rank)[first : first + self.experts]

    def expert_copy_ranks(self, rank: int) -> tuple[int, ...]:
        """Those of the `copy_ranks` that hold the same experts as `rank`."""
        own = self.place(rank).data % self.experts
        return tuple(each for each in self.copy_ranks(rank) if self.place(each).data % self.experts == own)

    def model_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks that compute one loss with `rank`: those of its replica with the same tokens and samples.
        Without a grid they hold one copy of the whole model together.
        """
        context, part = self.place(rank).context, self.sample_part(rank)
        same = (each for each in self.replica_ranks(rank) if self.place(each).context == context)
        return tuple(each for each in same if self.sample_part(each) == part)
