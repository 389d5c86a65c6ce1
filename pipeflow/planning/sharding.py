"""Sharding: the collectives of data ranks that divide weights, gradients or states (ZeRO, FSDP), and what computations
hide of them. Must not contain: work of a model, or memory.

ZeRO-1 reduces gradients once per step, each rank its part of them, and gathers the weights that the ranks updated
(arXiv 1910.02054, section 5). ZeRO-2 reduces the gradients of each microbatch. ZeRO-3 also gathers each layer before
its forward and again before its backward (section 5.3, and arXiv 2304.11277, section 3). Ranks of a pipeline gather a
stage for several microbatches and reduce its gradients once, as torch.distributed.pipelining does with FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.core.placement import Placement
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.rates import Exchange, RankGroup, Rates
from pipeflow.planning.setup import Setup, reduced_gradient
from pipeflow.planning.shares import Parameters

NONE = Exchange()


def require_pipeline(zero: int | None, ranks: int | None) -> None:
    """Raises UsageError for ZeRO-2 on several pipeline ranks."""
    if zero == 2 and ranks is not None and ranks > 1:
        raise UsageError(
            f"zero=2 needs one pipeline rank, got {ranks}: a stage adds up the whole gradients of all microbatches "
            "before it reduces them; use zero 1 or 3"
        )


class StageLayers(NamedTuple):
    """The layers of a stage: how many there are, and what one of them has and takes, as a mean.

    Attributes:
        number: how many there are.
        each: parameters of one on one device.
        ends: parameters of the stage that are in no layer.
        forward, backward: seconds of one layer's forward and whole backward, for one microbatch.
    """

    number: int
    each: Parameters
    ends: Parameters
    forward: float
    backward: float


def holders_of(placement: Placement, mesh: Mesh, stage: int) -> tuple[RankGroup, RankGroup]:
    """The devices that hold the same weights of a stage, and those that hold the same experts: replicas, and both
    copies in each replica of a bidirectional schedule.
    """
    copies = placement.ranks_of(stage)
    times = 1 if len(copies) == 1 else 2
    near = 1 if times == 1 or mesh.crosses(*copies) else 2
    others, experts = (
        RankGroup(times * group.ranks, near * group.in_node) for group in (mesh.data_group, mesh.expert_data_group)
    )
    return others, experts


@dataclass(frozen=True, slots=True)
class Sharding:
    """The collectives of the devices that hold one stage.

    Attributes:
        setup: says what is divided.
        holders: the devices: those of all weights but experts, and those of the experts.
        rates: of the cluster.
        by_layer: whether each layer's collectives come with its computations in each microbatch, as without a
            pipeline. Otherwise they come once per step, for the whole stage.
        alone: whether its ranks have no other stage. Otherwise the collectives of one stage run beside the
            computations of another, which a simulation shows, and not beside its own.
    """

    setup: Setup
    holders: tuple[RankGroup, RankGroup]
    rates: Rates
    by_layer: bool
    alone: bool = True

    def gather(self, parameters: Parameters) -> Exchange:
        """The times to gather the weights of so many parameters."""
        width = self.setup.precision.weight
        return NONE.plus(
            *(self.rates.reduction(group, width * count, rounds=1) for count, group, _ in self._groups(parameters))
        )

    def scatter(self, parameters: Parameters) -> Exchange:
        """The times to reduce the gradients of so many parameters, each rank its part. Copies of a part are summed."""
        width, rates = reduced_gradient(self.setup), self.rates
        return NONE.plus(
            *(
                rates.reduction(group, width * count, rounds=1).plus(
                    rates.reduction(copies, width * count / group.ranks)
                )
                for count, group, copies in self._groups(parameters)
            )
        )

    def _groups(self, parameters: Parameters) -> Iterator[tuple[float, RankGroup, RankGroup]]:
        """Numbers of parameters, with the ranks that hold them together, which are neighbours among the holders, and
        the ranks that hold the same part.
        """
        given = self.setup.shard_ranks
        for count, holders in zip(parameters, self.holders, strict=True):
            ranks = math.gcd(given, holders.ranks) if given else holders.ranks
            copies = RankGroup(holders.ranks // ranks, max(1, holders.in_node // ranks))
            yield count, RankGroup(ranks, min(ranks, holders.in_node)), copies

    def beyond(self, layers: StageLayers) -> tuple[float, float]:
        """Seconds that collectives add to a forward and a backward of one microbatch. The gather of the first layer,
        the reduction of the last one, and those of what precedes and follows the layers are never hidden.

        Without prefetch, a backward hides nothing. A layer's gather is launched after the backward of the layer before
        it in time, and so after its reduction on the same communicator, which waits for that backward.
        """
        if not self.by_layer or self.setup.zero < 2:
            return 0.0, 0.0
        is_gathered, is_reduced = self.setup.zero == 3, not self.setup.reduce_once
        (first, one), (last, scatter) = (
            (exchange(layers.ends), exchange(layers.each)) if asked else (NONE, NONE)
            for asked, exchange in ((is_gathered, self.gather), (is_reduced, self.scatter))
        )
        if not layers.number:
            return first.seconds, last.seconds
        others, both = layers.number - 1, one.plus(scatter)
        forward = others * self._added(layers.forward, one) + one.seconds
        if is_gathered and not self.setup.prefetch:
            return forward + first.seconds, layers.number * both.seconds + last.seconds
        backward = others * self._added(layers.backward, both) + self._added(layers.backward, one) + scatter.seconds
        return forward + first.seconds, backward + last.seconds

    def once(self, parameters: Parameters, layers: StageLayers) -> float:
        """Seconds of collectives that come once per step beside a stage of which so many `parameters` learn: the
        reduction of gradients after the last backward, and the gather of updated weights before the next forward.
        """
        zero, precision = self.setup.zero, self.setup.precision
        width = (precision.learned or precision).gradient
        if not zero or self.setup.frozen:  # a sum takes as long as its two halves
            groups = zip(parameters, self.holders, strict=True)
            summed = NONE.plus(*(self.rates.reduction(group, width * count) for count, group in groups))
            return self._rest(summed, layers.number, layers.backward)
        reduced = 0.0
        if not self.by_layer or zero == 1 or self.setup.reduce_once:
            reduced = self._rest(self.scatter(parameters), layers.number, layers.backward)
        return reduced if zero == 3 else reduced + self._rest(self.gather(parameters), layers.number, layers.forward)

    def _added(self, computed: float, exchange: Exchange) -> float:
        """Seconds that collectives add to a computation."""
        if not self.setup.overlaps:
            return exchange.seconds
        return self.rates.added(computed, exchange)

    def _rest(self, exchange: Exchange, layers: int, computed: float) -> float:
        """Seconds of a stage's collectives that are not hidden by the computations of its layers, which take `computed`
        each. Collectives of one layer are never hidden.
        """
        others = max(0, layers - 1) if self.alone else 0
        each = exchange.part(others + 1)
        return others * self._added(computed, each) + each.seconds
