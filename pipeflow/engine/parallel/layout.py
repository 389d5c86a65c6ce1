"""WorldLayout: maps ranks of the world to coordinates. Tensor ranks are neighbours, then come context ranks, the ranks
of a pipeline and the replicas, of which neighbours are expert ranks. Must not contain: connections between ranks.
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
    context: int = 0


@dataclass(frozen=True, slots=True)
class WorldLayout:
    """The sizes of a world: `data` replicas of a pipeline of `pipeline` ranks, each of which is `context` x `tensor`
    processes.

    Attributes:
        pipeline: number of ranks in a pipeline.
        tensor: number of processes that share every layer.
        data: number of replicas.
        context: number of processes that hold the same weights and share the tokens of each sequence.
        experts: number of replicas, next to each other, among which the experts of a layer are divided.

    Raises UsageError for a size that is not positive, and if `experts` does not divide `data`.

    >>> WorldLayout(pipeline=2, tensor=2, data=2).place(5)
    Coordinates(data=1, pipeline=0, tensor=1, context=0)
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    context: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        require_positive(
            pipeline=self.pipeline, tensor=self.tensor, data=self.data, context=self.context, experts=self.experts
        )
        if self.data % self.experts:
            multiple = self.world_size // self.data * self.experts
            raise UsageError(
                f"{self.experts} expert ranks do not divide the {self.data} replicas, among which they are: choose a "
                f"divisor of {self.data}, or start a multiple of {multiple} processes"
            )

    @classmethod
    def of(
        cls, world_size: int, pipeline: int | None = None, tensor: int = 1, context: int = 1, experts: int = 1
    ) -> WorldLayout:
        """The layout of a world of `world_size` processes, with as many replicas as fit. By default there are as many
        replicas as expert ranks, so one without these, and a pipeline through all processes.

        Raises UsageError if `world_size` is not a multiple of the size of one replica, and for expert ranks that do not
        divide the replicas.
        """
        require_positive(tensor=tensor, context=context, experts=experts)
        pipeline = max(1, world_size // (tensor * context * experts)) if pipeline is None else pipeline
        require_positive(pipeline=pipeline)
        one = pipeline * tensor * context
        if world_size % one:
            others = f" x context {context}" * (context > 1) + f" x tensor {tensor}" * (tensor > 1)
            raise UsageError(
                f"a world of {world_size} processes is not divisible into replicas of {one} (pipeline {pipeline}"
                f"{others}): start a multiple of {one} processes, as with torchrun --nproc-per-node {one}"
            )
        return cls(pipeline, tensor, world_size // one, context, experts)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tensor * self.data * self.context

    def place(self, rank: int) -> Coordinates:
        """The place of world rank `rank`."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        return Coordinates(*divmod(rest, self.pipeline), tensor, context)

    def rank(self, place: Coordinates) -> int:
        """The rank in the world of the process at `place`."""
        stage = place.data * self.pipeline + place.pipeline
        return (stage * self.context + place.context) * self.tensor + place.tensor

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks in the same pipeline as `rank`, in pipeline order."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(pipeline=index)) for index in range(self.pipeline))

    def replica_ranks(self, rank: int) -> range:
        """The world ranks of the same replica as `rank`, which read the same batches."""
        size = self.pipeline * self.context * self.tensor
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

    def copy_ranks(self, rank: int) -> tuple[int, ...]:
        """The world ranks that hold the same weights as `rank`: the context ranks of every replica."""
        return tuple(each for first in self.data_ranks(rank) for each in self.context_ranks(first))

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
        """The world ranks that together hold one copy of the whole model with `rank`: its replica's, of one context
        rank.
        """
        context = self.place(rank).context
        return tuple(each for each in self.replica_ranks(rank) if self.place(each).context == context)
