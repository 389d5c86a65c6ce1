"""Specs: how a tensor is split over tensor ranks, and how layers compute with it; plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pipeflow.core.errors import UsageError

if TYPE_CHECKING:
    from pipeflow.colossalai.tensor.process_group import ProcessGroup


@dataclass(frozen=True)
class ReplicaSpec:
    """Every rank has the whole."""


class ShardSpec:
    """Every tensor rank has an equal part along one dimension.

    Args:
        dims: list with the dimension.
        num_partitions: list with the number of parts.

    Raises UsageError for several dimensions.
    """

    def __init__(self, dims: Sequence[int], num_partitions: Sequence[int]) -> None:
        if len(dims) != 1 or len(num_partitions) != 1:
            raise UsageError(
                f"ShardSpec({list(dims)}, {list(num_partitions)}) splits {len(dims)} dimensions: split one, as in "
                "ShardSpec([-1], [pg.tp_world_size()])"
            )
        self.dim, self.partitions = int(dims[0]), int(num_partitions[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardSpec) and (self.dim, self.partitions) == (other.dim, other.partitions)

    def __hash__(self) -> int:
        return hash((self.dim, self.partitions))

    def __repr__(self) -> str:
        return f"ShardSpec([{self.dim}], [{self.partitions}])"


class ComputePattern(Enum):
    """Ways to compute layers. Only TP1D, Megatron-LM's, is supported."""

    TP1D = 0
    TP2D = 1
    TP2P5D = 2
    TP3D = 3


class ComputeSpec:
    """How layers compute with a tensor. Raises UsageError for another pattern than TP1D.

    Attributes:
        output_replicate: True (the default) if the parts of a layer's output are gathered.
    """

    def __init__(self, compute_pattern: ComputePattern) -> None:
        if compute_pattern is not ComputePattern.TP1D:
            raise UsageError(f"{compute_pattern} is not supported: use ComputePattern.TP1D")
        self.compute_pattern = compute_pattern
        self.output_replicate = True

    def set_output_replicate(self, flag: bool = True) -> None:
        """Sets whether the parts of a layer's output are gathered."""
        self.output_replicate = flag

    def __repr__(self) -> str:
        return f"ComputeSpec({self.compute_pattern}, output_replicate={self.output_replicate})"


@dataclass
class ColoTensorSpec:
    """The complete spec of a tensor: its ranks, how it is split over them, and how layers compute with it."""

    pg: ProcessGroup
    dist_attr: ReplicaSpec | ShardSpec = field(default_factory=ReplicaSpec)
    compute_attr: ComputeSpec | None = None
