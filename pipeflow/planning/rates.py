"""Rates: how long work and communication take on a cluster. Must not contain: what a model computes, or schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.planning.attention import Scores, fused_shares, unaligned
from pipeflow.planning.cluster import Cluster, longer
from pipeflow.planning.device import Device
from pipeflow.planning.efficiency import Efficiency
from pipeflow.planning.setup import FEW_BITS, PRECISIONS
from pipeflow.planning.work import DeviceWork, MatrixProduct


class RankGroup(NamedTuple):
    """`ranks` that compute a collective together, of which `in_node` share a node."""

    ranks: int
    in_node: int

    @property
    def nodes(self) -> int:
        """The number of nodes that it lies in."""
        return -(-self.ranks // self.in_node)


class Exchange(NamedTuple):
    """Seconds of collectives, and those that they take from computations beside them. Waiting for others takes none."""

    seconds: float = 0.0
    taken: float = 0.0

    def plus(self, *others: Exchange) -> Exchange:
        """One after the other."""
        return Exchange(*map(sum, zip(self, *others, strict=True)))

    def part(self, number: float) -> Exchange:
        """One of so many equal parts."""
        return Exchange(self.seconds / number, self.taken / number)


class Seconds(NamedTuple):
    """Times of a part of the model on one device, without communication and launches. They are the times of its
    forward, its whole backward, the weight gradients in its backward, and of attention scores in the forward and in the
    backward.
    """

    forward: float
    backward: float
    weight: float
    scores: float
    scores_backward: float = 0.0


KINDS = ("products", "attention", "elementwise", "recomputation", "launches", "context", "experts", "tensor")
"""The parts of the time of a stage's actions. A breakdown frees one after the other, from the last to the first."""

FROZEN = "weight gradients"
"""In `Rates.free` where weights do not learn."""

EXCHANGING = 20 / 132
"""Of the multiprocessors of H100: those that DeepSeek-V3's all-to-all takes (arXiv 2412.19437, section 3.2.2)."""

PEERS = 8
"""Ranks that NCCL's all-to-all reaches at the rate of links. Parts for others take that of the network, even in one
NVL72: among 64 of its devices each sends 43e9 bytes/s (rapidsai/rapidsmpf#833)."""

INNER_BACKWARD = 3  # times the products of a scan: two for each, and it is computed again

_LONG = Scores(None, math.inf, 128, True)


def no_units(device: Device, precision: str) -> UsageError:
    """The error for a precision that a device cannot compute in, which names those of PRECISIONS in which it can."""
    names = [each.name for each in PRECISIONS.values() if {each.products, each.needs} - {""} <= device.flops.keys()]
    can = f"use one of {', '.join(names)}, or describe" if names else "describe"
    return UsageError(f"{device.name} has no units for {precision}: {can} the device in a cluster file")


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a cluster in one precision, as `efficiency` lowers them. What is in `free`, some of KINDS, takes no
    time, so that a breakdown can tell what it adds.

    Raises UsageError for a precision that the device has no units for.
    """

    cluster: Cluster
    efficiency: Efficiency
    precision: str
    free: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        device = self.cluster.device
        if self.precision not in device.flops:
            raise no_units(device, self.precision)

    @property
    def peak(self) -> float:
        """FLOP/s of one device in products."""
        return self.cluster.device.flops[self.precision]

    @property
    def attention_peak(self) -> float:
        """FLOP/s of one device in attention, which runs in 16 bits where the other products run in fewer."""
        return self.cluster.device.flops.get("bf16", self.peak) if self.precision in FEW_BITS else self.peak

    def product(self, product: MatrixProduct) -> float:
        """Seconds of the products: their operations at the share of the peak that large ones reach, and longer for
        short dimensions.
        """
        known = self.efficiency
        if not product.flops or "products" in self.free:
            return 0.0
        shortest = min(product.columns, product.depth)
        times = 1 + known.depth / shortest + known.rows / product.rows
        if self.cluster.shapes:
            times *= longer(self.cluster.shapes, product.rows, shortest)
        return product.flops / (self.peak * known.products) * times

    def moving(self, count: float) -> float:
        """Seconds to read and write so many bytes of memory."""
        return 0.0 if "elementwise" in self.free else self._moved(count)

    def _moved(self, count: float) -> float:
        return count / (self.cluster.device.memory_bandwidth * self.efficiency.memory)

    def added(self, computed: float, exchange: Exchange) -> float:
        """Seconds that communication adds to computations beside it."""
        return max(computed + exchange.taken, exchange.seconds) - computed

    def taken(self, moved: float) -> float:
        """Seconds in which computations wait for the memory, where collectives beside them pass on so many bytes."""
        return self.efficiency.contention * moved / self.cluster.device.memory_bandwidth

    def stepping(self, count: float) -> float:
        """Seconds in which the optimizer reads and writes so many bytes of memory."""
        known = self.efficiency
        share = known.memory if known.optimizer is None else known.optimizer
        return count / (self.cluster.device.memory_bandwidth * share)

    def seconds(self, work: DeviceWork) -> Seconds:
        """The times of the work. The backward has two products for each one, moves twice as much, and computes again
        what the work says.
        """
        products, moved = sum(map(self.product, work.products)), self.moving(work.moved_bytes)
        stored = 0.0 if "attention" in self.free else self._moved(work.score_bytes)
        rate, back = self.attention(work.scores)
        scores = work.attention_flops / rate + stored
        again = (2 * work.attention_flops + work.again_flops) / back + 2 * stored
        inner = self._inner(work)
        backward, rest = self.efficiency.backward / 2, products + moved + inner
        weight = 0.0 if FROZEN in self.free else backward * products + self.moving(work.added_bytes)
        whole = backward * (products + 2 * moved + again + INNER_BACKWARD * inner) + weight
        return Seconds(rest + scores, whole, weight, scores, backward * again)

    def _inner(self, work: DeviceWork) -> float:
        """Seconds of a scan: of its products, or of its operations in float32."""
        rate = self.cluster.device.flops.get("float32", self.peak)
        scalar = 0.0 if "products" in self.free else work.scalar_flops / rate
        return sum(map(self.product, work.inner)) + scalar

    def attention(self, scores: Scores | None) -> tuple[float, float]:
        """FLOP/s of attention in a forward and in a backward. Without a fused kernel it is two products for each head,
        which are as short as the head is wide. A measured `efficiency.attention` holds for every shape.
        """
        known, peak = self.efficiency, math.inf if "attention" in self.free else self.attention_peak
        if known.attention is not None:
            return peak * known.attention, peak * known.attention
        scores = _LONG if scores is None else scores
        if scores.kernel == "unfused":
            times = (1 + known.depth / scores.head + known.rows / scores.tokens) * unaligned(scores.head)
            return peak * known.products / times, peak * known.products / times
        shares = fused_shares(scores, self.cluster.device.like)
        return peak * known.fused * shares.forward, peak * known.fused * shares.backward

    def all_reduce(self, group: RankGroup, count: float, link: float, network: float) -> float:
        """Seconds to sum so many bytes over a group by two rounds of a ring. `link` and `network` are the shares of the
        two bandwidths that are reached.
        """
        return self._collective(group, count, link, network, rounds=2).seconds

    def _collective(self, group: RankGroup, count: float, link: float, network: float, *, rounds: int) -> Exchange:
        """The times of so many rounds of a ring: in one, each rank passes on all parts of `count` bytes but its own.
        Between nodes, the ring uses the network of all ranks of the group in a node. A part arrives after a hop for
        each rank, within a node or between two.
        """
        if group.ranks == 1 or not count:
            return Exchange()
        cluster, nodes = self.cluster, group.nodes
        bandwidth, near, far = cluster.link_bandwidth * link, cluster.link_latency, cluster.network_latency
        hops = (group.ranks - 1) * near
        if nodes > 1:
            bandwidth = min(bandwidth, group.in_node * cluster.network_bandwidth * network)
            hops = (group.ranks - nodes) * near + nodes * far
        start = rounds * (self.efficiency.collective / 2 + hops)  # so that a sum takes as long as its two halves
        moved = rounds * (group.ranks - 1) / group.ranks * count
        return Exchange(start + moved / bandwidth, self.taken(moved))

    def tensor_sum(self, group: RankGroup, count: float) -> float:
        """Seconds of a tensor-parallel all-reduce, or of the all-gather and reduce-scatter that sequence parallelism
        has in its place. Where the host runs ahead, it does not wait for the others.
        """
        if "tensor" in self.free:
            return 0.0
        known = self.efficiency
        waiting = 0.0 if self.cluster.device.runs_ahead else known.sync * (group.ranks - 1)
        return waiting + self.all_reduce(group, count, known.link, known.network)

    def gather(self, group: RankGroup, count: float) -> float:
        """Seconds in which each rank of a group gets `count` bytes, an equal part from each of them; or in which it
        gets its part of their sum.
        """
        return self._collective(group, count, self.efficiency.link, self.efficiency.network, rounds=1).seconds

    def exchange(self, group: RankGroup, count: float, across: float) -> Exchange:
        """The times of an all-to-all in which each rank of a group sends `count` bytes, an equal part to each of them.
        Of `across` bytes, the parts for other nodes go over the network: `count`, or less if a node forwards one copy
        to several of its ranks. Parts for ranks of the same node go over its links meanwhile.
        """
        if group.ranks == 1 or not count:
            return Exchange()
        known, cluster = self.efficiency, self.cluster
        near = group.in_node if across < count else min(group.in_node, PEERS)
        away = (group.ranks - near) / group.ranks
        passed_on = count * away if across < count else 0.0
        inside = (count * (near - 1) / group.ranks + passed_on) / (cluster.link_bandwidth * known.link)
        outside = across * away / (cluster.network_bandwidth * known.network)
        latency = cluster.network_latency if outside else cluster.link_latency
        seconds = known.collective + latency + max(inside, outside)
        return Exchange(seconds, self.taken(count) + EXCHANGING * seconds)

    def pass_on(self, group: RankGroup, count: float) -> float:
        """Seconds in which each rank of a ring passes so many bytes to the next one."""
        known, cluster = self.efficiency, self.cluster
        if group.ranks > group.in_node:
            return cluster.network_latency + count / (cluster.network_bandwidth * known.network)
        return cluster.link_latency + count / (cluster.link_bandwidth * known.link)

    def reduction(self, group: RankGroup, count: float, *, rounds: int = 2) -> Exchange:
        """The times to reduce gradients of so many bytes over data ranks. One round leaves each with its part, or
        gathers weights.
        """
        known = self.efficiency
        link = known.link if known.gradients is None else known.gradients
        return self._collective(group, count, link, known.reduction, rounds=rounds)

    def gradient_sum(self, group: RankGroup, count: float) -> float:
        """Seconds to reduce gradients of so many bytes over the replicas."""
        return self.reduction(group, count).seconds
