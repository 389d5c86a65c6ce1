"""WorldLayout: maps ranks of the world to coordinates. Tensor ranks are neighbours, then come the ranks of a pipeline,
then the replicas. Must not contain: connections between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive


class Coordinates(NamedTuple):
    """One process's index along each dimension of a layout."""

    data: int
    pipeline: int
    tensor: int


@dataclass(frozen=True, slots=True)
class WorldLayout:
    """The sizes of a world: `data` replicas of a pipeline of `pipeline` ranks, each of which is `tensor` processes.

    Attributes:
        pipeline: number of ranks in a pipeline.
        tensor: number of processes that share every layer.
        data: number of replicas.

    >>> WorldLayout(pipeline=2, tensor=2, data=2).place(5)
    Coordinates(data=1, pipeline=0, tensor=1)
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        require_positive(pipeline=self.pipeline, tensor=self.tensor, data=self.data)

    @classmethod
    def of(cls, world_size: int, pipeline: int | None = None, tensor: int = 1) -> WorldLayout:
        """The layout of a world of `world_size` processes, with as many replicas as fit. By default there is one
        replica, a pipeline through all processes.

        Raises UsageError if `world_size` is not a multiple of the size of one replica.
        """
        require_positive(tensor=tensor)
        pipeline = max(1, world_size // tensor) if pipeline is None else pipeline
        require_positive(pipeline=pipeline)
        one = pipeline * tensor
        if world_size % one:
            by_tensor = f" x tensor {tensor}" if tensor > 1 else ""
            raise UsageError(
                f"a world of {world_size} processes is not divisible into replicas of {one} (pipeline {pipeline}"
                f"{by_tensor}): start a multiple of {one} processes, as with torchrun --nproc-per-node {one}"
            )
        return cls(pipeline, tensor, world_size // one)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tensor * self.data

    def place(self, rank: int) -> Coordinates:
        """The place of world rank `rank`."""
        replica, within = divmod(rank, self.pipeline * self.tensor)
        return Coordinates(replica, *divmod(within, self.tensor))

    def rank(self, place: Coordinates) -> int:
        """The rank in the world of the process at `place`."""
        return (place.data * self.pipeline + place.pipeline) * self.tensor + place.tensor

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks in the same pipeline as `rank`, in pipeline order."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(pipeline=index)) for index in range(self.pipeline))

    def replica_ranks(self, rank: int) -> range:
        """The world ranks that together hold the same copy of the whole model as `rank`."""
        size = self.pipeline * self.tensor
        return range(rank // size * size, (rank // size + 1) * size)

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks that hold the parts of the same layers as `rank`."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(tensor=index)) for index in range(self.tensor))

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks that hold the same weights as `rank`, one per replica."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(data=index)) for index in range(self.data))
