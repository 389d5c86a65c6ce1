"""Mesh: the node of each rank of a layout. Must not contain: the transfers between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeflow.planning.rates import RankGroup

Order = Literal["pipeline", "data"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices in the order of their ranks, `per_node` in each node. Tensor ranks are neighbours; `inner` is the
    dimension that comes next: "pipeline" as in pipeflow's launch, or "data" as in Megatron-LM.
    """

    tensor: int
    pipeline: int
    data: int
    per_node: int
    inner: Order = "pipeline"

    @property
    def tensor_group(self) -> RankGroup:
        """The tensor ranks of one stage."""
        return RankGroup(self.tensor, self._in_node(self.tensor, 1))

    @property
    def data_group(self) -> RankGroup:
        """The group of the replicas of one stage."""
        return RankGroup(
            self.data, self._in_node(self.data, self.tensor * (self.pipeline if self.inner == "pipeline" else 1))
        )

    def crosses(self, one: int, other: int) -> bool:
        """Whether two pipeline ranks lie in different nodes."""
        stride = self.tensor * (1 if self.inner == "pipeline" else self.data)
        return one * stride // self.per_node != other * stride // self.per_node

    @property
    def senders(self) -> int:
        """How many devices of a node send at the same time, when a pipeline rank sends to one in another node."""
        if self.inner == "data":
            return min(self.tensor * self.data, self.per_node)
        replicas = max(1, self.per_node // (self.tensor * self.pipeline))
        return min(self.tensor * min(replicas, self.data), self.per_node)

    def _in_node(self, ranks: int, stride: int) -> int:
        return max(1, min(ranks, self.per_node // stride))
