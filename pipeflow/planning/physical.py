"""The costs of a layout's stages. On a cluster they are physical: seconds of each stage's actions, of transfers between
stages, of gradient reductions and of the optimizer. Without one, they are operations alone. Must not contain: the order
in which stages run, or the memory of ranks.

Operations are counted as in arXiv 2104.04473 (Narayanan et al.), section 5.1 and appendix, where an activation function
or a norm costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from pipeflow.core.action import Kind
from pipeflow.core.analysis.simulation import simulate_shared
from pipeflow.core.cost import CostModel, Link, costs_of
from pipeflow.core.dataflow import Content
from pipeflow.core.errors import UsageError
from pipeflow.core.partition import Cut
from pipeflow.core.placement import Placement
from pipeflow.core.schedule import Schedule
from pipeflow.core.timeline import Timeline
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device_map import DeviceMap, map_devices
from pipeflow.planning.efficiency import Efficiency
from pipeflow.planning.engines import engine_named
from pipeflow.planning.kept import deferred_bytes, op_linears, recomputed_modules, saved_bytes, with_slice_buffers
from pipeflow.planning.layer_seconds import host_bandwidth, model_layer_times
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.rates import FROZEN, RankGroup, Rates, Seconds, no_units
from pipeflow.planning.setup import FEW_BITS, Setup
from pipeflow.planning.sharding import Sharding, StageLayers, holders_of
from pipeflow.planning.shares import (
    Parameters,
    Share,
    for_shares,
    parameters_of,
    passed_bytes,
    sequence_of,
    shares_of,
    slice_parts,
    stage_layers,
    tokens_of,
)
from pipeflow.planning.transformer import GPT
from pipeflow.planning.work import embedding_work, head_work, learned_parameters
from pipeflow.schedules.orders.additions import gathering

FREE_LAUNCHES = {"forward_launch": 0.0, "backward_launch": 0.0, "sync": 0.0}


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of one stage on one device. Bytes are those of one microbatch.

    Attributes:
        times: seconds of its actions F, I and W; B takes both halves.
        communication: the part of all three in which tensor ranks communicate.
        sizes: bytes that are kept from a forward to its backward, and between the two halves of a backward.
        activation_bytes: bytes that are sent to the next stage.
        parameters: how many parameters the device holds.
        layers: its layers.
        learned: how many parameters of the device learn.
    """

    times: Mapping[Kind, float]
    communication: float
    sizes: Mapping[Content, float]
    activation_bytes: float
    parameters: Parameters
    layers: StageLayers
    learned: Parameters


@dataclass(frozen=True, slots=True)
class Physical:
    """The costs of a layout on a cluster, in seconds.

    Attributes:
        cost: for `simulate`; `reduce` has the reductions of each stage's gradients over the replicas.
        communication: per stage, the seconds of one microbatch in which tensor ranks communicate; `cost` counts them.
        tied: seconds to sum the gradients of a word table that the first and the last stage share, at the end of the
            step.
        optimizer: seconds of the optimizer's step, on the rank where it takes longest.
        processors: number of processors that all pipeline ranks share, if they share any. The times of `cost` are then
            those of a rank that has one processor for itself.
        sharding: per stage, the seconds that gathers and reductions of divided weights and gradients add to one
            microbatch; `cost` counts them.
    """

    cost: CostModel
    communication: tuple[float, ...]
    tied: float
    optimizer: float
    processors: float | None = None
    sharding: tuple[float, ...] = ()

    def timeline(self, schedule: Schedule, cost: CostModel | None = None, within: float = math.inf) -> Timeline:
        """The simulated timeline of `schedule` under these costs, or under `cost`. Stages that are divided are gathered
        as `gathering` says. Raises LateError as `simulate_shared`.
        """
        cost = self.cost if cost is None else cost
        if cost.unshard:
            schedule = gathering(schedule)
        return simulate_shared(schedule, cost, self.processors or math.inf, within)

    @property
    def after(self) -> float:
        """Seconds of a step after the end of the timeline: sums over shared tables, and the optimizer."""
        return self.tied + self.optimizer


def physical_costs(
    model: Transformer,
    placement: Placement,
    setup: Setup,
    cluster: Cluster,
    *,
    mesh: Mesh | None = None,
    cut: Cut = "uniform",
    free: frozenset[str] = frozenset(),
    slices: int = 1,
) -> Physical:
    """The costs of `model`, with the layers of `stage_layers` on each stage. `cluster.efficiency` may replace
    coefficients of `PUBLISHED`. Devices are as in `mesh`, by default as `Mesh.of` a setup has them; of several kinds,
    those of a rank are as `map_devices` says. What is in `free`, some of `rates.KINDS`, takes no time.
    Costs are those of whole microbatches, also for a schedule that cuts each into so many `slices`: see `_in_slices`.

    Raises UsageError for a model that the setup does not fit, a precision that a device does not have, unknown
    coefficients, and as `map_devices`.
    """
    if slices > 1:
        costs = partial(physical_costs, model, placement, cluster=cluster, mesh=mesh, cut=cut)
        found = _in_slices(costs, setup, sequence_of(model, setup), free, slices)
        shares = shares_of(model, stage_layers(model, placement, cut))
        return replace(found, cost=with_slice_buffers(found.cost, model, setup, shares))
    inner = None if mesh is None else mesh.inner
    mapped = map_devices(cluster, setup, placement.num_ranks, inner)
    tokens_of(model, setup)  # raises the error for a sequence before others
    parts = stage_layers(model, placement, cut)
    shares = shares_of(model, parts)

    def on_kind(kind: int) -> Physical:
        rates, own = rates_of(mapped.kinds[kind], setup, free), mesh
        if own is None or len(mapped.kinds) > 1:
            own = mapped.mesh(setup, kind, inner)
        stages = for_shares(model, parts, lambda share: _stage_costs(model, setup, own, rates, share))
        held = {tuple(shares[stage] for stage in placement.stages_of(rank)) for rank in mapped.ranks_on(kind)}
        most = max((_learned(model, each, setup) for each in held), key=lambda each: each.total)
        tied = _tied(model, placement, setup, own, rates)
        return physical_of(stages, placement, setup, own, rates, most=most, tied=tied)

    return _slowest([on_kind(kind) for kind in range(len(mapped.kinds))], mapped, placement)


def _in_slices(
    costs: Callable[..., Physical], setup: Setup, sequence: int, free: frozenset[str], slices: int
) -> Physical:
    """The costs of microbatches of so many slices. All but attention is that of sequences that are as many times
    shorter, since small products are less efficient, and more of them are started. So are exchanges of tensor and
    context ranks, and of layers that are divided. What comes once per step is that of whole sequences.
    """
    parts = slice_parts(setup)
    short = replace(setup, sequence=max(1, sequence // slices // parts) * parts)
    part = costs(setup=short, free=free | {"attention"})
    whole, without = (costs(setup=setup, free=each) for each in (free, free | {"attention"}))
    kinds = "forward", "backward_input", "backward_weight"

    def times(kind: str) -> tuple[float, ...]:
        rows = (getattr(each.cost, kind) for each in (part, whole, without))
        return _in_all(slices, *rows)

    found: dict[str, Any] = {kind: times(kind) for kind in kinds}
    others = sum(sum(getattr(without.cost, kind)) for kind in kinds)
    total, attention = sum(map(sum, found.values())), sum(sum(getattr(whole.cost, kind)) for kind in kinds) - others
    return replace(
        whole,
        cost=replace(whole.cost, attention=attention / total if total else 0.0, **found),
        communication=_in_all(slices, part.communication, whole.communication, without.communication),
        sharding=_in_all(slices, part.sharding, whole.sharding, without.sharding),
    )


def _in_all(slices: int, part: Sequence[float], whole: Sequence[float], without: Sequence[float]) -> tuple[float, ...]:
    """Per stage, the seconds of all slices without attention, and those that attention adds to a whole microbatch."""
    return tuple(slices * own + all_ - others for own, all_, others in zip(part, whole, without, strict=True))


def _slowest(costs: Sequence[Physical], mapped: DeviceMap, placement: Placement) -> Physical:
    """The costs of a layout that lies on several kinds of devices: `costs` are those if all devices were of one kind. A
    stage takes as long as on the slowest kind of its ranks, and a transfer as long as on the slower of both ends.
    """
    if len(costs) == 1:
        return costs[0]
    kinds = [
        sorted({kind for rank in placement.ranks_of(stage) for kind in mapped.ranks[rank]})
        for stage in range(placement.num_stages)
    ]

    def of_stages(times: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(max(times[kind][stage] for kind in own) for stage, own in enumerate(kinds)) if all(times) else ()

    first = costs[0].cost
    stage_times: dict[str, Any] = {
        name: of_stages([getattr(each.cost, name) for each in costs])
        for name in ("forward", "backward_input", "backward_weight", "reduce", "unshard", "offload")
    }
    pairs = {pair for path in placement.paths for pair in pairwise(path)}
    links = {}
    for one, other in (ends for pair in pairs for ends in (pair, pair[::-1])):
        both = [costs[kind].cost.link(one, other) for kind in {*mapped.ranks[one], *mapped.ranks[other]}]
        links[one, other] = Link(max(each.latency for each in both), min(each.bandwidth for each in both))
    return Physical(
        replace(first, links=links, **stage_times),
        of_stages([each.communication for each in costs]),
        max(costs[kind].tied for kind in {*kinds[0], *kinds[-1]}),
        max(each.optimizer for each in costs),
        sharding=of_stages([each.sharding for each in costs]),
    )


def rates_of(cluster: Cluster, setup: Setup, free: frozenset[str] = frozenset()) -> Rates:
    """The rates of a cluster in the precision of a setup. An engine with `one_buffer` reduces gradients at the rate of
    other collectives, unless the cluster has a measured one. Raises UsageError as `physical_costs` does.
    """
    precision, device = setup.precision, cluster.device
    if not {precision.products, precision.needs} - {""} <= device.flops.keys():
        raise no_units(device, precision.name)
    rates = _rates_in(cluster, setup.precision.products, free | frozenset([FROZEN] * setup.frozen))
    if not engine_named(setup.engine).one_buffer or "reduction" in cluster.efficiency:
        return rates
    return replace(rates, efficiency=replace(rates.efficiency, reduction=rates.efficiency.network))


def head_rates(rates: Rates) -> Rates:
    """The rates of the head, which stays in 16 bits."""
    is_apart = rates.precision in FEW_BITS and "bf16" in rates.cluster.device.flops
    return _rates_in(rates.cluster, "bf16", rates.free) if is_apart else rates


def _rates_in(cluster: Cluster, precision: str, free: frozenset[str]) -> Rates:
    given = {**cluster.efficiency, **(FREE_LAUNCHES if "launches" in free else {})}
    known = Efficiency.of(given, cluster.device.like, precision, cluster.device.intensity(precision))
    return Rates(cluster, known, precision, free)


def physical_of(
    stages: Sequence[StageCosts],
    placement: Placement,
    setup: Setup,
    mesh: Mesh,
    rates: Rates,
    *,
    most: Parameters,
    tied: float,
) -> Physical:
    """The costs of a layout whose stages have these costs. `most` are the parameters that learn on the device with
    most, and `tied` are the seconds of summing gradients that several stages share.
    """
    cluster = rates.cluster
    by_layer, alone = placement.num_ranks == 1, len(placement.paths) == 1 and len(stages) == placement.num_ranks
    holders = [holders_of(placement, mesh, stage) for stage in range(len(stages))]
    sharding = [Sharding(setup, each, rates, by_layer, alone) for each in holders]
    beyond = [own.beyond(each.layers) for own, each in zip(sharding, stages, strict=True)]
    near = cluster.link_bandwidth * rates.efficiency.transfer
    start = rates.efficiency.transfer_start
    times: dict[Kind, list[float]] = {
        Kind.F: [each.times[Kind.F] + more for each, (more, _) in zip(stages, beyond, strict=True)],
        Kind.I: [each.times[Kind.I] + more for each, (_, more) in zip(stages, beyond, strict=True)],
        Kind.W: [each.times[Kind.W] for each in stages],
        Kind.R: _for_each(sharding, stages, lambda own, each: own.once(each.learned, each.layers)),
    }
    if setup.zero == 3 and not by_layer:
        times[Kind.U] = _for_each(sharding, stages, lambda own, each: own.gather(each.parameters).seconds)
    times = {kind: [seconds / cluster.sharing for seconds in each] for kind, each in times.items()}
    sizes = {content: [each.sizes[content] for each in stages] for content in (Content.SAVED, Content.DEFERRED)}
    sizes[Content.INPUT] = [0.0, *(each.activation_bytes for each in stages[:-1])]  # first a part of the batch
    if host := cluster.device.host_bandwidth:
        times[Kind.O] = [size / host for size in sizes[Content.SAVED]]
    cost = costs_of(
        times,
        sizes,
        activation_bytes=tuple(each.activation_bytes for each in stages),
        latency=start + cluster.link_latency,
        bandwidth=near,
        links=_links(placement, mesh, cluster, rates),
        unit="s",
    )
    communication = tuple(each.communication / cluster.sharing for each in stages)
    processors = _processors(mesh, cluster) if cluster.sharing > 1 else None
    added = tuple(sum(each) / cluster.sharing for each in beyond)
    return Physical(cost, communication, tied, _optimizer(most, setup, rates), processors, added)


def _for_each(
    sharding: Sequence[Sharding], stages: Sequence[StageCosts], of: Callable[[Sharding, StageCosts], float]
) -> list[float]:
    """`of` each stage, computed once for stages of equal shares, which are one object, with the same holders."""
    keys = [(own.holders, id(each)) for own, each in zip(sharding, stages, strict=True)]
    different = dict(zip(keys, zip(sharding, stages, strict=True), strict=True))
    found = {key: of(*both) for key, both in different.items()}
    return [found[key] for key in keys]


def _processors(mesh: Mesh, cluster: Cluster) -> float:
    """The number of processors of one replica and one tensor rank, over all pipeline stages. Nodes that are not full
    have as many.
    """
    ranks = mesh.tensor * mesh.pipeline * mesh.data
    return mesh.pipeline * cluster.devices_per_node / cluster.sharing / min(ranks, cluster.devices_per_node)


def _links(placement: Placement, mesh: Mesh, cluster: Cluster, rates: Rates) -> dict[tuple[int, int], Link]:
    """The links between pipeline ranks in different nodes. Those who share a card and do not send leave their part."""
    cards = cluster.devices_per_node // cluster.devices_per_nic
    network = cluster.network_bandwidth * cluster.devices_per_nic / max(1.0, mesh.senders / cards)
    far = Link(
        rates.efficiency.transfer_start + cluster.network_latency,
        min(network * rates.efficiency.network, cluster.link_bandwidth * rates.efficiency.transfer),
    )
    pairs = {pair for path in placement.paths for pair in pairwise(path)}
    return {ends: far for one, other in pairs for ends in ((one, other), (other, one)) if mesh.crosses(one, other)}


@lru_cache(maxsize=1024)
def _stage_costs(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates, share: Share) -> StageCosts:
    """The costs of a stage with a share of a model. A search asks for the same share under many schedules and cuts."""
    tokens = tokens_of(model, setup)
    sizes = {
        Content.SAVED: tokens * saved_bytes(model, setup, share),
        Content.DEFERRED: tokens * deferred_bytes(model, setup, share),
    }
    collective = rates.tensor_sum(mesh.tensor_group, tokens * model.hidden * setup.precision.weight)
    parts = [(count, model_layer_times(kind, each, mesh, rates)) for count, kind, each in share.kinds(model, setup)]
    forward, backward, weight, communication = (sum(count * times[i] for count, times in parts) for i in range(4))
    whole = parameters_of(model, [share], setup)
    layers = _layers(model, setup, share, whole, forward, backward)
    ends: list[Seconds] = []
    if share.first:
        each = rates.seconds(embedding_work(model, setup))
        ends.append(Seconds(each.forward + collective, each.backward + collective, each.weight, 0.0))
        communication += 2 * collective
    if share.last:
        work = head_work(model, setup)
        each = head_rates(rates).seconds(work)
        moved = rates.moving(work.moved_bytes)
        end = Seconds(each.forward, each.backward - moved + collective, each.weight, 0.0)
        ends.append(Seconds(end.forward + end.backward, 0.0, 0.0, 0.0) if setup.head_slices > 1 else end)
        communication += collective
    times = {
        Kind.F: forward + sum(each.forward for each in ends),
        Kind.I: backward - weight + sum(each.backward - each.weight for each in ends),
        Kind.W: weight + sum(each.weight for each in ends),
    }
    sent, learned = passed_bytes(model, setup), _learned(model, [share], setup)
    return StageCosts(times, communication, sizes, sent, whole, layers, learned)


def _learned(model: Transformer, shares: Collection[Share], setup: Setup) -> Parameters:
    """The parameters that learn of a device with these shares."""
    return (learned_parameters if setup.frozen else parameters_of)(model, shares, setup)


def _layers(
    model: Transformer, setup: Setup, share: Share, whole: Parameters, forward: float, backward: float
) -> StageLayers:
    """The layers of a share with these parameters, which together take so many seconds, and what is in none of them."""
    ends = parameters_of(model, [share._replace(layers=())], setup)
    number = max(1, len(share.layers))
    each = Parameters((whole.others - ends.others) // number, whole.experts // number)
    return StageLayers(len(share.layers), each, ends, forward / number, backward / number)


def _tied(model: Transformer, placement: Placement, setup: Setup, mesh: Mesh, rates: Rates) -> float:
    first, last = placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
    if first == last or setup.frozen or not (isinstance(model, GPT) and model.tied):
        return 0.0
    table = model.vocabulary_rows(setup.tensor) * model.hidden
    group = RankGroup(2, 1 if mesh.crosses(first, last) else 2)
    return rates.gradient_sum(group, setup.precision.gradient * table)


def _optimizer(most: Parameters, setup: Setup, rates: Rates) -> float:
    """Reads and writes the optimizer's state once, the gradients three times (unscaling, norm, step), and writes the
    weights. Of what is offloaded, gradients are copied to the host, which steps its part and copies weights back.
    """
    precision = setup.precision.learned or setup.precision
    state = 2 * (1 - setup.offload_optimizer) * (precision.master + precision.moments)
    others = 3 * precision.gradient + precision.weight
    parts = (most.others, setup.shards), (most.experts, setup.expert_shards)
    seconds = rates.stepping(
        sum(count * (state / shards + others / (shards if setup.zero > 1 else 1)) for count, shards in parts)
    )
    if not setup.offload_optimizer:
        return seconds
    host = rates.cluster.device
    copied = (precision.gradient + precision.weight) / host_bandwidth(host)
    return seconds + setup.offload_optimizer * sum(count / of for count, of in parts) * (copied + 1 / host.host_step)


def stage_costs(
    model: Transformer,
    placement: Placement,
    setup: Setup,
    cluster: Cluster | None = None,
    *,
    flops: float | None = None,
    cut: Cut = "uniform",
) -> CostModel:
    """The costs of one microbatch on each stage, with the layers of `stage_layers`: on a `cluster` those of
    `physical_costs`. Without one, times are in seconds if `flops`, the operations per second of one device, is given,
    otherwise in forwards of one layer; bytes are those of one device, and transfers are free.

    Raises UsageError for a model that the setup does not fit.
    """
    if cluster is not None:
        return physical_costs(model, placement, setup, cluster, cut=cut).cost
    tokens = tokens_of(model, setup)
    if flops is not None and not (math.isfinite(flops) and flops > 0):
        raise UsageError(f"flops must be positive and finite, got {flops}: operations per second of one device")
    unit = layer_forward(model, setup) if flops is None else flops * setup.tensor / tokens
    parts = stage_layers(model, placement, cut)

    def costs(share: Share) -> tuple[float, ...]:
        times = (each / unit for each in _operations(model, setup, share))
        return *times, tokens * saved_bytes(model, setup, share), tokens * deferred_bytes(model, setup, share)

    forward, backward_input, backward_weight, saved, deferred = zip(*for_shares(model, parts, costs), strict=True)
    return CostModel(
        forward,
        backward_input,
        backward_weight,
        saved_bytes=saved,
        deferred_bytes=deferred,
        unit="" if flops is None else "s",
    )


def layer_forward(model: Transformer, setup: Setup) -> int:
    """Operations of one layer's forward per token, on all tensor ranks: 24h^2 (1 + s/6h) for r = 4. Of layers of
    several kinds, that of the first one.
    """
    model = model.of_kind(model.kinds[0]) if model.pattern is not None else model
    return model.linear_flops + model.attention_flops(sequence_of(model, setup))


def _operations(model: Transformer, setup: Setup, share: Share) -> tuple[float, float, float]:
    """Operations per token of F, I and W. Each half of a linear's backward costs as much as its forward. Attention's
    backward is all in I and costs twice its forward (arXiv 2401.10241, table 1). Recomputation, which layers alone
    have, is a part of I. A linear that reads the batch needs no I. With `head_slices`, F has all of the head.
    """
    linears = attention = again = 0
    for layers, kind, each in share.kinds(model, setup):
        attended = kind.attention_flops(sequence_of(model, setup))
        linears += layers * kind.linear_flops
        attention += layers * attended
        kept = {"selective": attended, "full": kind.linear_flops + attended}.get(str(each.checkpoint), 0)
        again += layers * (kept + _recomputed_flops(kind, each))
    first = model.embedding_flops if share.first else 0
    last = model.head_flops if share.last else 0
    forward, backward = first + linears + attention + last, linears + 2 * attention + again
    weights = 0 if setup.frozen else first + linears
    if setup.head_slices > 1:
        return forward + last + (0 if setup.frozen else last), backward, weights
    return forward, backward + last, weights + (0 if setup.frozen else last)


def _recomputed_flops(model: Transformer, setup: Setup) -> int:
    """Operations per token, on all tensor ranks, of the modules that the backward of a layer makes again, or of the
    products that a checkpoint "op" does.
    """
    if setup.checkpoint == "op":
        return 2 * sum(linear.weights for linear in op_linears(model, setup))
    mlps = model.linear_flops - 2 * sum(linear.weights for linear in model.attention_linears)
    flops = {
        "core_attn": model.attention_flops(sequence_of(model, setup)),
        "mla_up_proj": 2 * sum(linear.weights for linear in model.from_latent),
        "mlp": mlps,
        "moe": mlps,
        "shared_experts": 2 * model.shared_experts * model.mlp_weights,
    }
    return sum(flops.get(module, 0) for module in recomputed_modules(model, setup))
