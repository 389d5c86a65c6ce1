"""Mesh: the node of each rank of a layout. Must not contain: the transfers between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeflow.planning.rates import RankGroup
from pipeflow.planning.setup import Setup

Order = Literal["pipeline", "data"]


def order_of(setup: Setup) -> Order:
    """What comes next to each other: replicas where they exchange tokens, and else pipeline ranks."""
    return "data" if setup.expert > 1 else "pipeline"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices in the order of their ranks, `per_node` in each node. Tensor ranks are neighbours, then context ranks;
    `inner` is the dimension that comes next: "pipeline" as in pipeflow's launch, or "data" as in Megatron-LM. The
    devices of a stage are also those of its experts, in the order of their ranks (arXiv 2504.14960). Each pipeline rank
    in `starts` begins another node.
    """

    tensor: int
    pipeline: int
    data: int
    per_node: int
    inner: Order = "pipeline"
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    starts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        setup: Setup,
        pipeline: int,
        per_node: int,
        inner: Order | None = None,
        starts: tuple[int, ...] = (),
    ) -> Mesh:
        """The mesh of a setup. Unless `inner` is given, it is `order_of` the setup."""
        sizes = setup.context, setup.expert, setup.expert_split
        return cls(setup.tensor, pipeline, setup.data, per_node, inner or order_of(setup), *sizes, starts)

    @property
    def tensor_group(self) -> RankGroup:
        """The tensor ranks of one stage."""
        return self._group(self.tensor, 1)

    @property
    def context_group(self) -> RankGroup:
        """The devices that share the tokens of a sequence."""
        return self._group(self.context, self.tensor)

    @property
    def data_group(self) -> RankGroup:
        """The devices that hold the same weights of one stage: its replicas and their context ranks."""
        return self._group(self.context * self.data, self.tensor)

    @property
    def expert_tensor_group(self) -> RankGroup:
        """The devices that share an expert."""
        return self._group(self.expert_tensor, 1)

    @property
    def expert_group(self) -> RankGroup:
        """The devices that exchange tokens, each with its own experts."""
        return self._group(self.expert, self.expert_tensor)

    @property
    def expert_data_group(self) -> RankGroup:
        """The devices that hold the same experts."""
        split = self.expert * self.expert_tensor
        return self._group(self.tensor * self.context * self.data // split, split)

    def crosses(self, one: int, other: int) -> bool:
        """Whether two pipeline ranks lie in different nodes."""
        if self.starts:
            first, second = (max((each for each in self.starts if each <= rank), default=0) for rank in (one, other))
            if first != second:
                return True
            one, other = one - first, other - first
        stride = self.tensor * self.context * (1 if self.inner == "pipeline" else self.data)
        return one * stride // self.per_node != other * stride // self.per_node

    @property
    def senders(self) -> int:
        """How many devices of a node send at the same time, when a pipeline rank sends to one in another node."""
        if self.inner == "data":
            return min(self.tensor * self.context * self.data, self.per_node)
        replicas = max(1, self.per_node // (self.tensor * self.context * self.pipeline))
        return min(self.tensor * self.context * min(replicas, self.data), self.per_node)

    def _group(self, ranks: int, stride: int) -> RankGroup:
        """Every `stride`th device of a stage, `ranks` of them. Where pipeline ranks come before replicas, a stage has a
        block of neighbours in each replica.
        """
        block = self.tensor * self.context
        if self.inner == "data":
            return RankGroup(ranks, self._in_node(ranks, stride))
        near = min(ranks, max(1, block // stride))
        inside = self._in_node(near, stride)
        apart = max(stride, block) * self.pipeline
        return RankGroup(ranks, inside * self._in_node(ranks // near, apart) if inside == near else inside)

    def _in_node(self, ranks: int, stride: int) -> int:
        return max(1, min(ranks, self.per_node // stride))
