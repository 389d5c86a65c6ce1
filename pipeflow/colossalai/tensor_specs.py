"""Specs: how a tensor is split over tensor ranks, and how layers compute with it; its parts and its whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from torch import Tensor

from pipeflow.core.errors import UsageError
from pipeflow.engine.parallel.context import Context, current_context
from pipeflow.engine.parallel.layout import WorldLayout
from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.engine.tensor.regions import gather_from_tensor_region, scatter_to_tensor_region


class ProcessGroup:
    """The world as `dp_degree` x `tp_degree` ranks, where tensor ranks are neighbours. Groups of equal degrees are
    equal.

    Args:
        tp_degree: number of tensor ranks; by default the world size / `dp_degree`.
        dp_degree: number of data ranks; by default the world size / `tp_degree`. Without either all are data ranks.

    Raises UsageError before `launch`, if the degrees do not fit the world, and for a world with a pipeline.
    """

    def __init__(self, *, tp_degree: int | None = None, dp_degree: int | None = None) -> None:
        context = current_context()
        world = context.world_size
        if context.pipeline_size > 1:
            raise UsageError("a ProcessGroup has only tensor and data ranks: launch without pipeline=")
        given = {"tp_degree": tp_degree, "dp_degree": dp_degree}
        for name, degree in given.items():
            if degree is not None and (degree < 1 or world % degree):
                sizes = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
                raise UsageError(f"{name}={degree} does not divide the world of {world} ranks: choose one of {sizes}")
        tensor = tp_degree if tp_degree is not None else 1 if dp_degree is None else world // dp_degree
        if dp_degree is not None and tensor * dp_degree != world:
            raise UsageError(f"tp_degree={tp_degree} x dp_degree={dp_degree} is not the world of {world} ranks")
        self.layout = WorldLayout(pipeline=1, tensor=tensor, data=world // tensor)
        self._context = context

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGroup) and (self.layout, self._context) == (other.layout, other._context)

    def __hash__(self) -> int:
        return hash(self.layout)

    def __repr__(self) -> str:
        return f"ProcessGroup(tp_degree={self.layout.tensor}, dp_degree={self.layout.data})"

    def __deepcopy__(self, memo: object) -> ProcessGroup:
        return self  # channels cannot be copied

    @property
    def context(self) -> Context:
        """The context of the launch in which it was made."""
        return self._context

    @cached_property
    def tensor(self) -> Group:
        """The ranks that hold the other parts of the same parameters."""
        return self._group(self.layout.tensor_ranks(self._context.rank), self._context.tensor)

    @cached_property
    def data(self) -> Group:
        """The ranks that hold the same parts for other data."""
        return self._group(self.layout.data_ranks(self._context.rank), self._context.data)

    def tp_world_size(self) -> int:
        """Returns the number of tensor ranks."""
        return self.layout.tensor

    def dp_world_size(self) -> int:
        """Returns the number of data ranks."""
        return self.layout.data

    def tp_local_rank(self) -> int:
        """Returns this rank's index among the tensor ranks."""
        return self.layout.place(self._context.rank).tensor

    def dp_local_rank(self) -> int:
        """Returns this rank's index among the data ranks."""
        return self.layout.place(self._context.rank).data

    def tp_rank_list(self) -> list[int]:
        """Returns the world ranks of the tensor ranks."""
        return list(self.layout.tensor_ranks(self._context.rank))

    def dp_rank_list(self) -> list[int]:
        """Returns the world ranks of the data ranks."""
        return list(self.layout.data_ranks(self._context.rank))

    def _group(self, ranks: tuple[int, ...], known: Group) -> Group:
        """The context's own group if it has these ranks, else a new one."""
        here = self._context
        same = here.layout.tensor_ranks(here.rank) if known is here.tensor else here.layout.data_ranks(here.rank)
        return known if ranks == same else here.world.group(ranks)


@dataclass(frozen=True)
class ReplicaSpec:
    """A layout in which every rank has the whole tensor."""


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


def part_of(whole: Tensor, spec: ColoTensorSpec) -> Tensor:
    """This rank's part of a whole tensor, copied if it is smaller. Its backward gathers the gradients."""
    if not isinstance(spec.dist_attr, ShardSpec) or spec.pg.tp_world_size() == 1:
        return whole
    last = whole.movedim(spec.dist_attr.dim, -1)
    return scatter_to_tensor_region(last, spec.pg.tensor).movedim(-1, spec.dist_attr.dim).contiguous()


def whole_of(part: Tensor, spec: ColoTensorSpec) -> Tensor:
    """The whole tensor, gathered from all tensor ranks. In its backward every rank takes its part of the gradient."""
    if not isinstance(spec.dist_attr, ShardSpec) or spec.pg.tp_world_size() == 1:
        return part
    last = part.movedim(spec.dist_attr.dim, -1)
    return gather_from_tensor_region(last, spec.pg.tensor).movedim(-1, spec.dist_attr.dim)
