"""Device map: the kinds of nodes that each pipeline rank of a layout lies on. Must not contain: what a kind of device
takes.

If the devices of each kind are a whole number of pipeline ranks, in whole nodes, then a rank lies on one kind, and the
first ranks lie on the first kind. With several replicas, the launch lists nodes of all kinds in turn. Otherwise each
rank counts as one on all kinds, as where replicas are divided among them. Nodes then count as small as their common
divisor, so that no group that lies in two nodes is planned in one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.core.text import listed
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.mesh import Mesh, Order, order_of
from pipeflow.planning.rates import RankGroup
from pipeflow.planning.setup import Setup


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """Where a layout lies.

    Attributes:
        kinds: the kinds of nodes, each a cluster of one kind, with as many devices per node as links are planned for.
        devices: how many devices of each kind the layout takes.
        ranks: per pipeline rank, the kinds that its devices are of, as places in `kinds`.
    """

    kinds: tuple[Cluster, ...]
    devices: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def is_mixed(self) -> bool:
        """Whether each pipeline rank lies on several kinds."""
        return len(self.ranks[0]) > 1

    @property
    def starts(self) -> tuple[int, ...]:
        """The pipeline ranks at which another kind begins."""
        return tuple(rank for rank in range(1, len(self.ranks)) if self.ranks[rank] != self.ranks[rank - 1])

    def ranks_on(self, kind: int) -> tuple[int, ...]:
        """The pipeline ranks that lie on a kind, alone or among others."""
        return tuple(rank for rank, kinds in enumerate(self.ranks) if kind in kinds)

    def on(self, rank: int) -> tuple[Cluster, ...]:
        """The kinds that a pipeline rank lies on."""
        return tuple(self.kinds[kind] for kind in self.ranks[rank])

    def described(self, placement: Placement) -> str:
        """Which stages lie on which kind, in a line without its beginning, "stages: ".

        >>> fast, slow = Cluster.of("h100-80gb", nodes=1), Cluster.of("a100-80gb")
        >>> found = map_devices(replace(fast, further=(slow,)), Setup(tensor=4), 4)
        >>> found.described(Placement.linear(4))
        '0-1 on h100-80gb (nodes of 8), 2-3 on a100-80gb (nodes of 8)'
        """
        if self.is_mixed:
            names = listed([*dict.fromkeys(kind.device.name for kind in self.kinds)])
            slowest = "the slowest of them in " if len({kind.device.name for kind in self.kinds}) > 1 else ""
            return f"each on all nodes of {names}, planned as {slowest}nodes of {self.kinds[0].devices_per_node}"
        parts = []
        for place, kind in enumerate(self.kinds):
            stages = sorted({stage for rank in self.ranks_on(place) for stage in placement.stages_of(rank)})
            parts.append(f"{ranges(stages)} on {kind.device.name} (nodes of {kind.devices_per_node})")
        return ", ".join(parts)

    def mesh(self, setup: Setup, kind: int, inner: Order | None = None) -> Mesh:
        """The mesh of the layout as ranks of this kind see it."""
        return Mesh.of(setup, len(self.ranks), self.kinds[kind].devices_per_node, inner, self.starts)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, in which those that follow each other are one range.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2 5 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@lru_cache(maxsize=1024)
def map_devices(cluster: Cluster, setup: Setup, pipeline: int, inner: Order | None = None) -> DeviceMap:
    """Where a layout of so many pipeline ranks lies on a cluster. `inner` is as in `Mesh`.

    >>> fast, slow = Cluster.of("h100-80gb", nodes=1), Cluster.of("a100-80gb")
    >>> map_devices(replace(fast, further=(slow,)), Setup(tensor=4), 4).ranks
    ((0,), (0,), (1,), (1,))
    >>> map_devices(replace(fast, further=(slow,)), Setup(data=16), 1).ranks
    ((0, 1),)

    Raises UsageError for more devices than the cluster has, and for tensor or context ranks on two kinds.
    """
    taken = cluster.taken(pipeline * setup.tensor * setup.replicas)
    kinds, devices = zip(*taken, strict=True)
    if len(kinds) == 1:
        return DeviceMap(kinds, devices, ((0,),) * pipeline)
    copy = setup.tensor * setup.context
    for kind, many in taken:
        if many % copy:
            raise UsageError(
                f"groups of {copy} tensor and context ranks do not divide the {many} devices {kind.device.name} that "
                "the layout takes: such a group must lie on one kind of nodes, so use a number that divides them"
            )
    is_together = setup.data == 1 or (inner or order_of(setup)) == "data"  # all devices of a rank
    if all(
        many % (copy * setup.data) == 0 and (is_together or many // setup.data % kind.devices_per_node == 0)
        for kind, many in taken
    ):
        ranks = ((place,) * (many // (copy * setup.data)) for place, many in enumerate(devices))
        return DeviceMap(kinds, devices, tuple((place,) for each in ranks for place in each))
    size = math.gcd(*devices, *(kind.devices_per_node for kind in kinds))
    alike = tuple(
        replace(kind, devices_per_node=size, devices_per_nic=math.gcd(size, kind.devices_per_nic)) for kind in kinds
    )
    return DeviceMap(alike, devices, (tuple(range(len(kinds))),) * pipeline)


def crossing(setup: Setup, pipeline: int, cluster: Cluster) -> dict[str, bool]:
    """Per kind of ranks that communicate, whether any of them do so between nodes.

    >>> crossing(Setup(tensor=8, data=2), 4, Cluster.of("a100-80gb"))
    {'tensor': False, 'pipeline': True, 'data': True}
    """
    mapped = map_devices(cluster, setup, pipeline)
    meshes = [mapped.mesh(setup, kind) for kind in range(len(mapped.kinds))]

    def is_far(groups: list[RankGroup]) -> bool:
        return any(group.nodes > 1 for group in groups)

    groups = {
        "tensor": [mesh.tensor_group for mesh in meshes],
        "context": [mesh.context_group for mesh in meshes],
        "expert": [mesh.expert_group for mesh in meshes],
    }
    found = {name: is_far(each) for name, each in groups.items() if each[0].ranks > 1}
    if pipeline > 1:
        found["pipeline"] = any(mesh.crosses(rank, rank + 1) for mesh in meshes for rank in range(pipeline - 1))
    if setup.data > 1:
        found["data"] = is_far([mesh.data_group for mesh in meshes])
    return found
