"""ColossalAI's ProcessGroupMesh: process groups of torch.distributed along the axes of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import current_context


class ProcessGroupMesh:
    """All processes as a grid, and torch.distributed's groups along its axes. All ranks make the same calls of methods
    that make groups.

    Args:
        size: number of ranks along each axis; the ranks along the last axis are neighbours.

    Raises UsageError before `launch`, and if the sizes do not multiply to the number of processes.
    """

    def __init__(self, *size: int) -> None:
        context = current_context()
        if prod(size) != context.world_size:
            raise UsageError(f"a mesh of {' x '.join(map(str, size))} does not have {context.world_size} processes")
        self.shape = size
        self.rank = context.rank
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Returns the number of ranks along an axis; by default those along each axis."""
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Returns this rank's index along an axis; by default those along each axis."""
        place = self.unravel(self.rank, self.shape)
        return place if dim is None else place[dim]

    @staticmethod
    def unravel(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the indices of a rank along each axis."""
        return tuple(int(index) for index in torch.unravel_index(torch.tensor(rank, device="cpu"), tuple(shape)))

    @staticmethod
    def ravel(coord: Sequence[int], shape: Sequence[int], mode: str = "raise") -> int:
        """Returns the rank with these indices.

        Args:
            coord: index along each axis.
            shape: number of ranks along each axis.
            mode: an index that is too large or too small is an error with "raise", counts modulo the axis's length with
                "wrap", and means the nearest one with "clip".

        Raises UsageError for another mode, and for such an index.
        """
        if mode not in ("raise", "wrap", "clip"):
            raise UsageError(f"mode must be raise, wrap or clip, got {mode!r}")
        rank = 0
        for index, length in zip(coord, shape, strict=True):
            near = index % length if mode == "wrap" else min(max(index, 0), length - 1)
            if mode == "raise" and near != index:
                raise UsageError(f"there is no rank at {tuple(coord)} of a mesh of {' x '.join(map(str, shape))}")
            rank = rank * length + near
        return rank

    @staticmethod
    def get_coords_along_axis(
        base_coord: Sequence[int], axis: int | Sequence[int], indices_at_axis: Sequence[Any]
    ) -> list[tuple[int, ...]]:
        """Returns the places that differ from `base_coord` along the axes; there they have the given indices."""
        chosen = {axis: indices_at_axis} if isinstance(axis, int) else dict(zip(axis, indices_at_axis, strict=True))
        return list(product(*(chosen.get(each, (index,)) for each, index in enumerate(base_coord))))

    def get_group(self, ranks_in_group: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Returns the group of these ranks, which it makes once."""
        ranks = tuple(sorted(ranks_in_group))
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), backend=backend)
        return self._groups[ranks]

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """Returns the ranks in the world of the group's members."""
        return dist.get_process_group_ranks(group)

    def get_group_along_axis(
        self, axis: int | Sequence[int], indices_at_axis: Sequence[Any] | None = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Returns this rank's group of the ranks that differ along the axes. All groups along these axes are made.

        Args:
            axis: one or several axes.
            indices_at_axis: indices along the axis, or along each of them; by default all. None is returned on ranks
                with other indices.
            backend: torch.distributed's backend.
        """
        axes = [axis] if isinstance(axis, int) else list(axis)
        given = indices_at_axis and ([indices_at_axis] if isinstance(axis, int) else indices_at_axis)
        chosen = given or [range(self.shape[each]) for each in axes]
        firsts = product(*(range(1 if each in axes else length) for each, length in enumerate(self.shape)))
        own = None
        for first in firsts:
            ranks = [self.ravel(place, self.shape) for place in self.get_coords_along_axis(first, axes, chosen)]
            group = self.get_group(ranks, backend)
            own = group if self.rank in ranks else own
        return own

    create_group_along_axis = get_group_along_axis

    def destroy_mesh_process_groups(self) -> None:
        """Destroys the groups that this mesh made."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
