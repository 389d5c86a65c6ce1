"""ProcessGroup: the world as a grid of tensor ranks and data ranks."""

from __future__ import annotations

from functools import cached_property

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context, current_context
from pipeflow.parallel.layout import Layout
from pipeflow.parallel.transport.group import Group


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
        self.layout = Layout(pipeline=1, tensor=tensor, data=world // tensor)
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
