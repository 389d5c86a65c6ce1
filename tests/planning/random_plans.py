"""Random plans: a model, a layout and a cluster that fit each other, from a seed; and changes after which a plan must
not be worse. Must not contain: checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from pipeflow import GPT, PRECISIONS, Cluster, Schedule, Setup, UsageError, make_schedule, plan
from pipeflow.core.partition import Cut
from pipeflow.planning.cuts import fastest_cut
from pipeflow.planning.device import DEVICES
from pipeflow.planning.step_plan import Plan
from pipeflow.schedules.registry import COMPARED

FEWER = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}  # precisions of which the second moves and keeps fewer bytes


@dataclass(frozen=True, slots=True)
class Case:
    """A plan's arguments.

    Attributes:
        model, schedule, setup, cluster: as `plan` takes them.
        balanced: whether the cut is the fastest one, not an even one.
    """

    model: GPT
    schedule: Schedule
    setup: Setup
    cluster: Cluster
    balanced: bool

    def plan(self) -> Plan:
        """The plan. Raises UsageError for a case that cannot be."""
        return plan(self.model, self.schedule, self.setup, cluster=self.cluster, cut=self.cut)

    @property
    def cut(self) -> Cut:
        """The cut: even, or the one with the shortest step."""
        return fastest_cut(self.model, self.schedule, self.setup, self.cluster) if self.balanced else "uniform"


def random_case(seed: int) -> Case:
    """A case that can be planned. Seeds that give none are skipped for the next of their thousand."""
    random = Random(seed)
    while True:
        try:
            case = _drawn(random)
            case.plan()
        except UsageError:
            continue
        return case


def _drawn(random: Random) -> Case:
    model, cluster = _model(random), _cluster(random)
    name, ranks = random.choice(COMPARED), random.choice((1, 2, 4, 8))
    schedule = make_schedule(name, ranks=ranks, microbatches=random.choice((1, 2, 4, 8, 16, 3)))
    return Case(model, schedule, _setup(random, cluster, model.experts), cluster, random.random() < 0.3)


def _model(random: Random) -> GPT:
    heads = random.choice((4, 8, 16, 32, 64))
    routed: dict[str, Any] = {"experts": 8, "experts_per_token": 2} if random.random() < 0.2 else {}
    return GPT(
        layers=random.choice((8, 16, 24, 32)),
        hidden=heads * random.choice((64, 80, 96, 128)),
        heads=heads,
        kv_heads=random.choice((None, heads, heads // 4)),
        positions=random.choice((512, 2048, 8192)),
        vocabulary=random.choice((1024, 50304, 128256)),
        gated=random.random() < 0.5,
        tied=random.random() < 0.5,
        **routed,
    )


def _setup(random: Random, cluster: Cluster, experts: int) -> Setup:
    known = [name for name, each in PRECISIONS.items() if each.products in cluster.device.flops]
    zero = random.choice((0, 0, 1, 2, 3))
    given: dict[str, Any] = {
        "tensor": random.choice((1, 1, 2, 4, 8)),
        "data": random.choice((1, 2, 4, 8, 32)),
        "context": random.choice((1, 1, 1, 2, 4)),
        "context_kind": random.choice(("ring", "all-to-all")),
        "expert": random.choice((1, 2, 4, 8)) if experts > 1 else 1,
        "microbatch_size": random.choice((1, 2, 4)),
        "precision": PRECISIONS[random.choice(known)],
        "zero": zero,
        "shard_ranks": random.choice((None, None, 2)) if zero else None,
        "overlap": random.choice((None, True, False)),
        "checkpoint": random.choice(("none", "none", "full", "selective")),
        "sequence_parallel": random.random() < 0.5,
        "keep_scores": random.random() < 0.3,
        "eager": random.random() < 0.2,
        "document": random.choice((None, None, 256)),
    }
    return Setup(**given)


def _cluster(random: Random) -> Cluster:
    return Cluster.of(
        random.choice([*DEVICES]),
        devices_per_node=random.choice((2, 4, 8, 72)),
        link_bandwidth=10 ** random.uniform(9.5, 12),
        network_bandwidth=10 ** random.uniform(8.5, 11),
    )


Change = Callable[[Case, float], Case]


def random_mix(seed: int) -> Case:
    """A case on two kinds of devices, in whole nodes: each has about half of the pipeline ranks or of the replicas."""
    random = Random(seed)
    while True:
        try:
            case = _drawn(random)
        except UsageError:
            continue
        devices = len(case.schedule.rows) * case.setup.tensor * case.setup.replicas
        first, other = case.cluster, _cluster(random)
        nodes = devices // 2 // first.devices_per_node
        if nodes == 0 or case.setup.precision.products not in other.device.flops:
            continue
        other = replace(other, devices_per_node=first.devices_per_node)
        mix = replace(case, cluster=replace(first, nodes=nodes, further=(other,)))
        try:
            mix.plan()
        except UsageError:
            continue
        return mix


def _changed(case: Case, change: Callable[[Cluster], dict[str, Any]]) -> Case:
    """The case with these fields of each kind of devices changed."""
    further = tuple(replace(each, **change(each)) for each in case.cluster.further)
    return replace(case, cluster=replace(case.cluster, **change(case.cluster), further=further))


def faster_products(case: Case, by: float) -> Case:
    """All precisions get the same factor."""

    def faster(cluster: Cluster) -> dict[str, Any]:
        flops = {name: rate * by for name, rate in cluster.device.flops.items()}
        return {"device": replace(cluster.device, flops=flops)}

    return _changed(case, faster)


def faster_memory(case: Case, by: float) -> Case:
    """A higher memory bandwidth."""

    def faster(cluster: Cluster) -> dict[str, Any]:
        return {"device": replace(cluster.device, memory_bandwidth=cluster.device.memory_bandwidth * by)}

    return _changed(case, faster)


def faster_link(case: Case, by: float) -> Case:
    """A higher bandwidth within nodes."""
    return _changed(case, lambda cluster: {"link_bandwidth": cluster.link_bandwidth * by})


def faster_network(case: Case, by: float) -> Case:
    """A higher bandwidth between nodes."""
    return _changed(case, lambda cluster: {"network_bandwidth": cluster.network_bandwidth * by})


def shorter_latency(case: Case, by: float) -> Case:
    """Lower latencies of link and network."""
    return _changed(
        case,
        lambda cluster: {
            "link_latency": cluster.link_latency / by,
            "network_latency": cluster.network_latency / by,
        },
    )


def more_memory(case: Case, by: float) -> Case:
    """More bytes on each device."""

    def more(cluster: Cluster) -> dict[str, Any]:
        return {"device": replace(cluster.device, memory_bytes=cluster.device.memory_bytes * by)}

    return _changed(case, more)


def as_fast_as_the_other(case: Case, by: float) -> Case:
    """Each kind of devices gets the higher rates of both, and all that is lower is as it was; `by` does not matter."""
    kinds = [case.cluster, *case.cluster.further]
    devices = [each.device for each in kinds]
    both = [name for name in devices[0].flops if all(name in each.flops for each in devices)]
    flops = {name: max(each.flops[name] for each in devices) for name in both}
    best = {name: max(getattr(each, name) for each in devices) for name in ("memory_bandwidth", "memory_bytes")}
    links = {name: max(getattr(each, name) for each in kinds) for name in ("link_bandwidth", "network_bandwidth")}
    like = devices[0].like

    def better(cluster: Cluster) -> dict[str, Any]:
        return {"device": replace(cluster.device, flops=flops, like=like, **best), **links}

    return _changed(case, better) if {each.like for each in devices} == {like} else case


def fewer_bytes(case: Case, by: float) -> Case:
    """Gradients of two bytes, not of four; where they have two, a smaller vocabulary."""
    narrow = FEWER.get(case.setup.precision.name)
    if narrow is not None:
        overlaps = case.setup.overlaps  # of a program, which precisions suggest
        narrower = replace(case.setup, precision=PRECISIONS[narrow], overlap=overlaps)
        return replace(case, setup=narrower)
    return replace(case, model=replace(case.model, vocabulary=max(1, case.model.vocabulary // 2)))


CHANGES: dict[str, Change] = {
    "faster products": faster_products,
    "faster memory": faster_memory,
    "faster link": faster_link,
    "faster network": faster_network,
    "shorter latency": shorter_latency,
    "more memory": more_memory,
    "fewer bytes": fewer_bytes,
}


def seeds(share: int, of: int) -> Iterator[int]:
    """The seeds of a share of 2,000."""
    return iter(range(share, 2000, of))
