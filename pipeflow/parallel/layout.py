"""Layout: which rank of the world is where. Tensor ranks are neighbours, then come those of a pipeline, then the
replicas. Plain numbers; what connects the ranks is elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import require_positive


class Place(NamedTuple):
    """One process's index along each dimension of a layout."""

    data: int
    pipeline: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A world of `data` replicas of pipelines of `pipeline` ranks, each of them `tensor` processes.

    >>> Layout(pipeline=2, tensor=2, data=2).place(5)
    Place(data=1, pipeline=0, tensor=1)
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        require_positive(pipeline=self.pipeline, tensor=self.tensor, data=self.data)

    @classmethod
    def of(cls, world_size: int, pipeline: int | None = None, tensor: int = 1) -> Layout:
        """The layout of a world: as many replicas as it holds; by default a single one, of all its processes.

        Raises UsageError when the world is no multiple of what one replica needs.
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

    def place(self, rank: int) -> Place:
        """Where `rank` of the world is."""
        replica, within = divmod(rank, self.pipeline * self.tensor)
        return Place(replica, *divmod(within, self.tensor))

    def rank(self, place: Place) -> int:
        """The rank of the world that is at `place`."""
        return (place.data * self.pipeline + place.pipeline) * self.tensor + place.tensor

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks of the world that are in one pipeline with `rank`, in order of their stages."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(pipeline=index)) for index in range(self.pipeline))

    def replica_ranks(self, rank: int) -> range:
        """Those that hold one copy of the whole model together."""
        size = self.pipeline * self.tensor
        return range(rank // size * size, (rank // size + 1) * size)

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """Those that hold the other parts of the same layers."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(tensor=index)) for index in range(self.tensor))

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """Those that hold the same weights for other data."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(data=index)) for index in range(self.data))
