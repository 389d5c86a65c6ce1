"""Exchanges: the time in which a layer communicates inside its stage: sums of tensor ranks, tokens that go to experts
and back, and keys and values of context ranks. Must not contain: what the layer computes.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeflow.planning.blocks import Transformer
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.rates import Rates, Seconds
from pipeflow.planning.setup import Setup
from pipeflow.planning.sharding import hidden
from pipeflow.planning.transformer_costs import tokens_of

RING_AGAIN = 2  # times as much as in the forward goes around in the backward: keys and values, and their gradients


class Exchanged(NamedTuple):
    """Seconds in which a layer communicates in its forward, and in its backward. `sums` are the collectives of tensor
    ranks in each, and `last` the seconds of the last one of a forward.
    """

    forward: float
    backward: float
    sums: int
    last: float = 0.0


NOTHING = Exchanged(0.0, 0.0, 0)


def layer_exchanges(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates, layer: Seconds) -> Exchanged:
    """The communication of one layer whose computations take the seconds of `layer`."""
    summed = tokens_of(model, setup) * model.hidden * setup.precision.weight
    is_routed = model.experts > 1 and setup.expert > 1
    sums = 1 if model.parallel_block or (is_routed and not model.shared_experts) else 2
    one = rates.tensor_sum(mesh.tensor_group, summed)
    # behind products: attention hides the exchange of context ranks, and weight gradients may come later
    beside = layer.forward - layer.scores, layer.backward - layer.weight - layer.scores_backward
    first, second = (_shown(one, computed / sums, setup, mesh) for computed in beside)
    forward, backward = _context(model, setup, mesh, rates, layer)
    sent = expert_seconds(model, setup, mesh, rates)
    if setup.overlap_experts:  # while another microbatch computes as much
        there, back = (_added(computed, sent, rates) for computed in (layer.forward, layer.backward))
    else:
        there = back = sent
    return Exchanged(sums * first + forward + there, sums * second + backward + back, sums, first)


def _shown(one: float, computed: float, setup: Setup, mesh: Mesh) -> float:
    """The seconds of a collective of tensor ranks that are not hidden. Where the ranks of a node hide it, it has as
    many parts as there are ranks. One of them has no product beside it, and the others have what is `computed`.
    """
    if not setup.hides_tensor or mesh.tensor_group.nodes > 1:
        return one
    alone = one / setup.tensor
    return alone + max(0.0, one - alone - computed)


def _added(computed: float, sent: float, rates: Rates) -> float:
    """Seconds that communication adds to computations beside it."""
    return hidden(computed, sent, rates.efficiency.contention) - computed


def expert_seconds(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates) -> float:
    """Seconds in which tokens go to their experts and back. Each device sends its own part of the tokens, once for each
    expert. Devices that share an expert then gather what each of them got, and sum its outputs. Shared experts
    have a sum of tensor ranks as any MLP.
    """
    if model.experts == 1 or setup.expert == 1 or "experts" in rates.free:
        return 0.0
    tokens, row = tokens_of(model, setup), model.hidden * setup.precision.weight
    sent = tokens / setup.tensor * model.experts_per_token * row
    gathered = rates.tensor_sum(mesh.expert_tensor_group, sent * setup.expert_split)
    group = mesh.expert_group
    if setup.dispatcher != "all-to-all":
        own = tokens / setup.tensor * row
        devices, nodes = (own * met(model, parts) for parts in (group.ranks, group.nodes))
        return setup.imbalance * (2 * rates.exchange(group, devices, nodes) + gathered)
    return setup.imbalance * (2 * rates.exchange(group, sent, sent) + gathered)


def met(model: Transformer, parts: int) -> float:
    """How many of so many equal parts of the experts a token meets, whose experts are random ones of its groups."""
    near = max(1.0, parts * model.groups_per_token / model.expert_groups)
    return near * (1 - (1 - 1 / near) ** model.experts_per_token)


def _context(model: Transformer, setup: Setup, mesh: Mesh, rates: Rates, layer: Seconds) -> tuple[float, float]:
    """Seconds of a forward and of a backward in which context ranks exchange what attention needs.

    In a ring, keys and values of one rank after the other arrive while attention computes with those before (arXiv
    2310.01889); what takes longer than that computation is not hidden. With "all-to-all", each rank sends its tokens'
    heads to the ranks of these heads, and gets the output back (arXiv 2309.14509).
    """
    ranks = setup.context
    if ranks == 1 or "context" in rates.free:
        return 0.0, 0.0
    tokens, width, heads = tokens_of(model, setup), setup.precision.weight, model.heads // setup.tensor
    pair = model.head_width + model.value_width
    key_heads = heads if model.kv_rank is not None else max(1, model.key_heads // setup.tensor)
    if setup.context_kind == "all-to-all":
        sent = tokens * width * (heads + max(key_heads, ranks)) * pair
        both = rates.exchange(mesh.context_group, sent, sent)
        return both, both
    sent = tokens * width * key_heads * pair
    passed = rates.pass_on(mesh.context_group, sent)
    again = rates.pass_on(mesh.context_group, RING_AGAIN * sent)
    forward, backward = layer.scores / ranks, layer.scores_backward / ranks
    return (ranks - 1) * max(0.0, passed - forward), (ranks - 1) * max(0.0, again - backward)
