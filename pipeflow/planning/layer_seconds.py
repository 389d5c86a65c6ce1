"""Layer times: the seconds of one layer's forward and backward on a device, with launches, copies and communication
inside its stage: sums of tensor ranks, tokens that go to experts and back, and keys and values of context ranks. Must
not contain: stages, and what is once per step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pipeflow.core.errors import UsageError
from pipeflow.planning.blocks import Transformer
from pipeflow.planning.device import Device
from pipeflow.planning.kept import layer_kept, recomputed_modules
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.rates import FROZEN, Exchange, Rates, Seconds
from pipeflow.planning.scans import scan_made
from pipeflow.planning.setup import GRAPHS, Setup, stops_early
from pipeflow.planning.shares import tokens_of
from pipeflow.planning.work import adapter_work, layer_work, recomputed_work

WEIGHT_LAUNCHES = 0.4  # of a backward's launches, those of weight gradients: about their share of its computations
RING_AGAIN = 2  # times as much as in the forward goes around in the backward: keys and values, and their gradients
ROUTED_LAUNCHES, EXPERT_LAUNCHES = 2.0, 0.12
"""Launches of a layer with experts, and of one more expert, as multiples of those of a layer without. With them,
layers of Qwen3 235B with 16 experts on a device of four tensor ranks take as long as Megatron's model zoo measured: 9
ms, where their computations take 6 ms.
"""
GROUPED = 16  # experts of a device whose products are launched one by one; programs with more of them have one kernel


class Exchanged(NamedTuple):
    """Seconds in which a layer communicates in its forward, and in its backward; those that its sums over tensor ranks
    add to the launches of each; and those of the last sum of a forward.
    """

    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0
    last: float = 0.0


NOTHING = Exchanged()


def layer_times(
    layer: Seconds,
    rates: Rates,
    checkpoint: str,
    *,
    exchanged: Exchanged = NOTHING,
    launches: float = 1.0,
    again: float = 0.0,
    skipped: float = 0.0,
) -> tuple[float, float, float]:
    """Seconds of a layer's forward, of its whole backward including recomputation, and of the weight gradients in the
    backward. They are at least the times to launch `launches` transformer layers. If the device launches operations
    itself, these times are added. Each half of the backward has its own launches. If the launches were divided like the
    computations, a faster chip could make one half longer.

    Args:
        layer: its computations.
        rates: of the cluster.
        checkpoint: what the backward recomputes.
        exchanged: its communication.
        launches: the number of transformer layers that take as long to launch as this layer.
        again: seconds of what the backward computes again besides `checkpoint`.
        skipped: seconds of the forward that a full `checkpoint` does not compute again.
    """
    known, runs_ahead = rates.efficiency, rates.cluster.device.runs_ahead

    def taken(computed: float, launch: float) -> float:
        return max(computed, launch) if runs_ahead else computed + launch

    launch = launches * known.forward_launch + exchanged.waiting
    forward = taken(layer.forward + exchanged.forward, launch)
    relaunch = 0.0
    if "recomputation" in rates.free:
        again = 0.0
    elif checkpoint == "full":
        again, relaunch = again + (layer.forward + exchanged.forward - skipped), launch
    elif checkpoint == "selective":
        again += layer.scores
    for_weights = WEIGHT_LAUNCHES * launches * known.backward_launch if layer.weight else 0.0
    rest = launches * known.backward_launch - for_weights + relaunch
    inputs = taken(layer.backward - layer.weight + again + exchanged.backward, rest + exchanged.waiting)
    weights = taken(layer.weight, for_weights)
    return forward, inputs + weights, weights


def model_layer_times(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates) -> tuple[float, float, float, float]:
    """The seconds of `layer_times` for one layer of a model, and those of communication in them."""
    work = layer_work(model, setup)
    layer = rates.seconds(work)
    if setup.lora_rank:
        adapters = replace(rates, free=rates.free - {FROZEN}).seconds(adapter_work(model, setup))
        layer = Seconds(*map(sum, zip(layer, adapters, strict=True)))
    exchanged = layer_exchanges(model, setup, mesh, rates, layer)
    # Recomputation may stop before the last product. Outputs of experts are needed for the gradients of their weights.
    skipped = rates.product(work.products[-1]) if stops_early(setup) and model.experts == 1 else 0.0
    summed = exchanged.last if skipped else 0.0
    again = exchanged.forward - summed if setup.checkpoint == "full" else 0.0
    forward, backward, weight = layer_times(
        layer,
        rates,
        str(setup.checkpoint),
        exchanged=exchanged,
        launches=launches(model, setup),
        again=_recomputed_seconds(model, setup, mesh, rates),
        skipped=skipped + summed,
    )
    copied = _copy_seconds(model, setup, rates)
    times = max(forward, copied), max(backward - weight, copied) + weight, weight
    return *times, exchanged.forward + exchanged.backward + again


def launches(model: Transformer, setup: Setup) -> float:
    """How many times as long as a layer without experts the host takes to launch this one, without what CUDA graphs
    launch. Each of a device's experts has products of its own.
    """
    own = min(model.experts // setup.expert, GROUPED) if model.experts > 1 else 0
    whole = ROUTED_LAUNCHES + EXPERT_LAUNCHES * own if own else 1.0
    return whole * max(0.0, 1 - sum(GRAPHS[scope][model.experts > 1] for scope in setup.cuda_graphs))


def _recomputed_seconds(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates) -> float:
    """Seconds in which the backward of a layer computes its `recompute_modules` again, or what a checkpoint "op" does
    not keep, with their communication. The latter gathers the inputs of both MLP and attention, which together are as
    many bytes as one sum over tensor ranks.
    """
    modules, is_op = recomputed_modules(model, setup), setup.checkpoint == "op"
    if not (modules or is_op):
        return 0.0
    seconds = rates.seconds(recomputed_work(model, setup)).forward
    if (is_op and setup.sequence_parallel) or "mlp" in modules or "shared_experts" in modules:
        summed = tokens_of(model, setup) * model.hidden * setup.precision.weight
        seconds += rates.tensor_sum(mesh.tensor_group, summed)
    return seconds + (expert_exchange(model, setup, mesh, rates).seconds if "moe" in modules else 0.0)


def _copy_seconds(model: Transformer, setup: Setup, rates: Rates) -> float:
    """Seconds to copy to the host what an offloaded layer keeps, or back. Raises UsageError as `host_bandwidth`."""
    if not setup.offload_layers:
        return 0.0
    copied = replace(setup, offload_layers=0)
    return tokens_of(model, setup) * layer_kept(model, copied) / host_bandwidth(rates.cluster.device)


def host_bandwidth(device: Device) -> float:
    """Bytes/s of copies between a device and its host. Raises UsageError where this is not known."""
    if not device.host_bandwidth:
        raise UsageError(
            f"device {device.name!r} has no host_bandwidth, which copies to the host take: give it in a cluster file"
        )
    return device.host_bandwidth


def layer_exchanges(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates, layer: Seconds) -> Exchanged:
    """The communication of one layer whose computations take the seconds of `layer`."""
    summed = tokens_of(model, setup) * model.hidden * setup.precision.weight
    is_routed = model.experts > 1 and setup.expert > 1
    summing = (model.mixer != "") + (model.has_mlp and not (is_routed and not model.shared_experts))
    sums = min(summing, 1) if model.parallel_block else summing
    one = rates.tensor_sum(mesh.tensor_group, summed)
    # behind products: attention hides the exchange of context ranks, and weight gradients may come later
    beside = layer.forward - layer.scores, layer.backward - layer.weight - layer.scores_backward
    first, second = (_shown(one, computed / max(1, sums), setup, mesh) for computed in beside)
    forward, backward = _context(model, setup, mesh, rates, layer)
    sent = expert_exchange(model, setup, mesh, rates)
    there = back = sent.seconds
    if setup.overlap_experts:  # while another microbatch computes as much
        there, back = (rates.added(computed, sent) for computed in (layer.forward, layer.backward))
    sync = rates.efficiency.sync * (mesh.tensor - 1)
    waiting = sums * sync if rates.cluster.device.runs_ahead else 0.0  # else `one` has it
    return Exchanged(sums * first + forward + there, sums * second + backward + back, waiting, first * (sums > 0))


def _shown(one: float, computed: float, setup: Setup, mesh: Mesh) -> float:
    """The seconds of a collective of tensor ranks that are not hidden. Where the ranks of a node hide it, it has as
    many parts as there are ranks. One of them has no product beside it, and the others have what is `computed`.
    """
    if not setup.hides_tensor or mesh.tensor_group.nodes > 1:
        return one
    alone = one / setup.tensor
    return alone + max(0.0, one - alone - computed)


def expert_exchange(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates) -> Exchange:
    """The times in which tokens go to their experts and back. Each device sends its own part of the tokens, once for
    each expert. Devices that share an expert then gather what each of them got, and sum its outputs. Shared experts
    have a sum of tensor ranks as any MLP.
    """
    if model.experts == 1 or setup.expert == 1 or "experts" in rates.free:
        return Exchange()
    tokens, row, group = tokens_of(model, setup), model.hidden * setup.precision.weight, mesh.expert_group
    devices = nodes = sent = tokens / setup.tensor * model.experts_per_token * row
    if setup.dispatcher != "all-to-all":
        devices, nodes = (tokens / setup.tensor * row * met(model, parts) for parts in (group.ranks, group.nodes))
    gathered = sent * setup.expert_split
    shared = Exchange(rates.tensor_sum(mesh.expert_tensor_group, gathered), rates.taken(gathered))
    one = rates.exchange(group, devices, nodes)
    return one.plus(one, *[shared] * (setup.expert_split > 1)).part(1 / setup.imbalance)


def met(model: Transformer, parts: int) -> float:
    """How many of so many equal parts of the experts a token meets, whose experts are random ones of its groups."""
    near = max(1.0, parts * model.groups_per_token / model.expert_groups)
    return near * (1 - (1 - 1 / near) ** model.experts_per_token)


def _context(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates, layer: Seconds) -> tuple[float, float]:
    """Seconds of a forward and of a backward in which context ranks exchange what attention needs.

    In a ring, keys and values of one rank after the other arrive while attention computes with those before (arXiv
    2310.01889); what takes longer than that computation is not hidden. With "all-to-all", each rank sends its tokens'
    heads to the ranks of these heads, and gets the output back (arXiv 2309.14509). Ranks exchange the heads of scans in
    this way, whatever attention does (`MambaContextParallel` of Megatron-LM). With "gather", each rank gets the keys
    and values of all of them before attention, and sums their gradients after it (arXiv 2407.21783, section 3.3.2).
    """
    ranks, tensor = setup.context, setup.tensor
    if ranks == 1 or "context" in rates.free or not model.mixer:
        return 0.0, 0.0
    if model.mixer == "scan":
        numbers = scan_made(model, tensor) + model.scan_channels // tensor
        sent = tokens_of(model, setup) * setup.precision.weight * numbers
        both = rates.exchange(mesh.context_group, sent, sent).seconds
        return both, both
    tokens, width, heads = tokens_of(model, setup), setup.precision.weight, model.heads // setup.tensor
    pair = model.head_width + model.value_width
    key_heads = heads if model.kv_rank is not None else max(1, model.key_heads // setup.tensor)
    if setup.context_kind == "all-to-all":
        sent = tokens * width * (heads + max(key_heads, ranks)) * pair
        both = rates.exchange(mesh.context_group, sent, sent).seconds
        return both, both
    sent = tokens * width * key_heads * pair
    if setup.context_kind == "gather":
        both = rates.gather(mesh.context_group, ranks * sent)
        return both, both
    passed = rates.pass_on(mesh.context_group, sent)
    again = rates.pass_on(mesh.context_group, RING_AGAIN * sent)
    forward, backward = layer.scores / ranks, layer.scores_backward / ranks
    return (ranks - 1) * max(0.0, passed - forward), (ranks - 1) * max(0.0, again - backward)
