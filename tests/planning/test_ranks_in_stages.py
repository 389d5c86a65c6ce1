"""Context and expert ranks: which devices they are, what each of them has, and what they exchange; by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeflow import GPT, Placement, Setup, UsageError, make_schedule, plan
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.kept import layer_kept, recomputed_bytes
from pipeflow.planning.layer_seconds import expert_exchange, layer_exchanges, met
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import physical_costs, rates_of, stage_costs
from pipeflow.planning.rank_memory import held_by, rank_plan
from pipeflow.planning.rates import RankGroup, Rates, Seconds
from pipeflow.planning.setup import CHOICES
from pipeflow.planning.shares import stage_layers, tokens_of
from pipeflow.planning.work import layer_work

PLAIN: dict[str, Any] = {"gated": True, "biases": "none", "norm": "rms", "dropout": False, "tied": False}
DENSE = GPT(4, 1024, 16, 4096, 32000, kv_heads=4, ffn=2048, position_table=False, **PLAIN)
MIXTURE = replace(DENSE, experts=16, experts_per_token=2)
H100 = Cluster.of("h100-80gb", network_bandwidth=50e9)
EXPERT = 3 * 1024 * 2048  # weights of one


def rates(setup: Setup) -> Rates:
    return rates_of(H100, setup)


def seconds(model: GPT, setup: Setup) -> Seconds:
    return rates(setup).seconds(layer_work(model, setup))


def test_expert_ranks_are_devices_of_a_stage_whichever_copies_they_hold() -> None:
    """Two tensor ranks, two context ranks and eight replicas: 32 devices of a stage, four in a node of each group."""
    mesh = Mesh.of(Setup(tensor=2, context=2, data=8, expert=8, expert_tensor=2), 2, 8)
    assert mesh.inner == "data"
    assert mesh.context_group == RankGroup(2, 2)
    assert mesh.data_group == RankGroup(16, 4)
    assert mesh.expert_tensor_group == RankGroup(2, 2)
    assert mesh.expert_group == RankGroup(8, 4)
    assert mesh.expert_data_group == RankGroup(2, 1)
    assert mesh.crosses(0, 1)
    alone = Mesh.of(Setup(tensor=2, context=2, data=8, expert=8, expert_tensor=1), 2, 8)
    assert (alone.expert_group, alone.expert_data_group) == (RankGroup(8, 8), RankGroup(4, 1))


def test_context_ranks_come_before_pipeline_ranks() -> None:
    """Of 8 devices in a node, a pipeline of two ranks of four, and replicas in other nodes."""
    mesh = Mesh.of(Setup(tensor=2, context=2, data=4), 2, 8)
    assert (mesh.context_group, mesh.data_group) == (RankGroup(2, 2), RankGroup(8, 2))
    assert not mesh.crosses(0, 1)
    both = Mesh.of(Setup(tensor=1, context=2, data=4), 2, 8)
    assert both.data_group == RankGroup(8, 4)


def memory(setup: Setup, model: GPT = MIXTURE) -> Any:
    placement = Placement.linear(1)
    held = held_by(model, setup, placement, stage_layers(model, placement), 0)
    return rank_plan(setup, placement, 0, held, kept=0.0, idle=0.0)


def test_each_expert_rank_has_its_own_experts_and_their_optimizer() -> None:
    whole, divided = memory(Setup(data=8, zero=1)), memory(Setup(data=8, zero=1, expert=4))
    assert whole.parameters - divided.parameters == 4 * 12 * EXPERT
    others = whole.parameters - 4 * 16 * EXPERT
    assert whole.master_bytes == 4 * -(-(others + 4 * 16 * EXPERT) // 8)
    assert divided.master_bytes == 4 * (-(-others // 8) + 4 * 4 * EXPERT // 2)


def test_experts_on_ranks_of_their_own_compute_as_much_with_more_rows() -> None:
    """Two experts a token: 4096 x 2 rows for 16 experts; with 8 ranks, two experts have the rows of all of them."""
    whole, divided = layer_work(MIXTURE, Setup()), layer_work(MIXTURE, Setup(data=8, expert=8))
    assert (whole.products[3].rows, whole.products[3].repeats) == (512, 16)
    assert (divided.products[3].rows, divided.products[3].repeats) == (4096, 2)
    assert sum(each.flops for each in whole.products) == sum(each.flops for each in divided.products)
    uneven = layer_work(MIXTURE, Setup(data=8, expert=8, imbalance=1.5))
    assert uneven.products[3].rows == 1.5 * 4096
    split = layer_work(MIXTURE, Setup(tensor=2, data=4, expert=4, sequence_parallel=True))
    alone = layer_work(MIXTURE, Setup(tensor=2, data=4, expert=4, expert_tensor=1, sequence_parallel=True))
    assert (split.products[3].rows, split.products[3].columns) == (512 * 4, 2048)
    assert (alone.products[3].rows, alone.products[3].columns) == (512 * 2, 4096)


def test_tokens_go_to_their_experts_and_back_in_both_directions() -> None:
    """4096 tokens of 2 KiB, twice, of which 3 of 4 parts leave a device, and 7 of 8 parts leave half a node."""
    setup = Setup(data=4, expert=4)
    found = layer_exchanges(
        MIXTURE, setup, Mesh.of(setup, 1, 8), rates(setup), rates(setup).seconds(layer_work(MIXTURE, setup))
    )
    known = rates(setup).efficiency
    sent = 4096 * 2 * 2048
    start = known.collective + H100.link_latency
    assert found.forward == found.backward == pytest.approx(2 * (start + 3 / 4 * sent / (450e9 * known.link)))
    setup = Setup(data=8, expert=8)
    far = rates(setup).exchange(RankGroup(8, 4), 8e6, 8e6)
    assert far.seconds == pytest.approx(known.collective + H100.network_latency + 4e6 / (50e9 * known.network))


def test_among_many_ranks_of_one_node_the_all_to_all_of_nccl_is_as_slow_as_over_the_network() -> None:
    """As on an NVL72: 56 of 64 parts are for others than 8 near ranks. Kernels that forward tokens use the links."""
    within, known = rates(Setup()), rates(Setup()).efficiency
    plain, forwarded = (within.exchange(RankGroup(64, 64), 8e9, across).seconds for across in (8e9, 1e9))
    assert plain == pytest.approx(known.collective + H100.network_latency + 7e9 / (50e9 * known.network))
    near = 63 / 64 * 8e9 / (450e9 * known.link)
    assert forwarded == pytest.approx(known.collective + H100.link_latency + near)
    assert within.exchange(RankGroup(8, 8), 8e9, 8e9).seconds < forwarded


def test_deepep_sends_a_token_once_to_each_node() -> None:
    """Two experts on random ones of two nodes: 1.5 nodes. On eight devices, 15/8 of them, half of which get the token
    from another device of their node.
    """
    known = rates(Setup()).efficiency
    assert (met(MIXTURE, 2), met(MIXTURE, 8)) == pytest.approx((1.5, 15 / 8))
    limited = replace(MIXTURE, expert_groups=4, groups_per_token=2)
    assert (met(limited, 2), met(limited, 8)) == (1, met(MIXTURE, 4))
    away = 1.5 / 2 * 4e6 / (50e9 * known.network)
    near = 15 / 8 * 4e6 * (3 / 8 + 1 / 2) / (450e9 * known.link)
    start = known.collective + H100.network_latency
    found = rates(Setup()).exchange(RankGroup(8, 4), 15 / 8 * 4e6, 1.5 * 4e6)
    assert found.seconds == pytest.approx(start + max(away, near))
    assert found.taken == pytest.approx(rates(Setup()).taken(15 / 8 * 4e6) + 20 / 132 * found.seconds)
    flat, once, _ = (Setup(data=64, expert=16, dispatcher=each) for each in CHOICES["dispatcher"])
    many = replace(MIXTURE, experts_per_token=8)
    mesh = Mesh.of(flat, 1, 8)
    assert expert_exchange(many, once, mesh, rates(once)) < expert_exchange(many, flat, mesh, rates(flat))


def test_the_way_to_experts_may_hide_behind_another_microbatch() -> None:
    shown, hidden = Setup(data=8, expert=8), Setup(data=8, expert=8, overlap_experts=True)
    mesh, layer = Mesh.of(shown, 1, 8), seconds(MIXTURE, shown)
    sent, taken = expert_exchange(MIXTURE, shown, mesh, rates(shown))
    assert layer_exchanges(MIXTURE, shown, mesh, rates(shown), layer).forward == sent
    short = layer._replace(forward=sent / 16, backward=2 * sent)
    found = layer_exchanges(MIXTURE, hidden, mesh, rates(hidden), short)
    assert (found.forward, found.backward) == pytest.approx((sent * 15 / 16, taken))


def test_gradients_of_experts_are_summed_over_the_devices_that_have_them() -> None:
    setup = Setup(data=8, expert=8)
    mesh, placement = Mesh.of(setup, 1, 8), Placement.linear(1)
    reduced = physical_costs(MIXTURE, placement, setup, H100, mesh=mesh).cost.reduce[0]
    others = MIXTURE.parameters - 4 * 16 * EXPERT
    assert reduced == pytest.approx(rates(setup).gradient_sum(RankGroup(8, 8), 2 * others))


def test_context_ranks_have_a_part_of_the_tokens_and_all_weights() -> None:
    whole, parted = Setup(), Setup(context=4)
    assert tokens_of(DENSE, parted) == 1024
    one, four = (stage_costs(DENSE, Placement.linear(1), each) for each in (whole, parted))
    assert four.saved_bytes[0] == one.saved_bytes[0] / 4
    assert layer_work(DENSE, parted).attention_flops == layer_work(DENSE, whole).attention_flops / 4
    assert memory(parted, DENSE).parameters == memory(whole, DENSE).parameters
    assert memory(replace(parted, zero=1), DENSE).master_bytes == memory(whole, DENSE).master_bytes / 4
    found = plan(DENSE, make_schedule("1f1b", ranks=2, microbatches=4), parted, cluster=H100)
    assert (found.devices, found.tokens) == (8, 4 * 4096)


def test_a_ring_hides_what_takes_less_than_attention() -> None:
    """Keys and values of 4 heads of 64: 1024 numbers of 2 bytes for each of 512 tokens, seven times."""
    setup = Setup(context=8)
    layer = seconds(DENSE, setup)
    mesh, known = Mesh.of(setup, 1, 8), rates(setup).efficiency
    passed = H100.link_latency + 512 * 512 * 2 / (450e9 * known.link)
    shown = layer_exchanges(DENSE, setup, mesh, rates(setup), layer._replace(scores=0.0)).forward
    assert shown == pytest.approx(7 * passed)
    hidden = layer_exchanges(DENSE, setup, mesh, rates(setup), layer._replace(scores=8 * passed))
    assert hidden.forward == 0
    far = replace(H100, devices_per_node=4)
    across = rates_of(far, setup).pass_on(Mesh.of(setup, 1, 4).context_group, 1e6)
    assert across == pytest.approx(far.network_latency + 1e6 / (50e9 * known.network))


def test_an_all_to_all_of_heads_is_not_hidden() -> None:
    """Query and output of 16 heads of 64, key and value of 4 heads, 1024 tokens a rank."""
    setup = Setup(context=4, context_kind="all-to-all")
    found = layer_exchanges(
        DENSE, setup, Mesh.of(setup, 1, 8), rates(setup), rates(setup).seconds(layer_work(DENSE, setup))
    )
    sent = 1024 * 2 * (16 + 4) * 128
    assert found.forward == rates(setup).exchange(RankGroup(4, 4), sent, sent).seconds
    assert found.backward == found.forward


def test_a_gather_of_keys_is_not_hidden_and_keeps_those_of_all_ranks() -> None:
    """Key and value of 4 heads of 64, 1024 tokens a rank: a ring of four passes on three quarters of all of them."""
    kinds: list[dict[str, Any]] = [{"context_kind": kind} for kind in ("gather", "ring", "all-to-all")]
    setup, *others = (Setup(context=4, **each) for each in kinds)
    found = layer_exchanges(
        DENSE, setup, Mesh.of(setup, 1, 8), rates(setup), rates(setup).seconds(layer_work(DENSE, setup))
    )
    known, passed = rates(setup).efficiency, 3 * 1024 * 2 * 4 * 128
    start = known.collective / 2 + 3 * H100.link_latency
    assert found.forward == found.backward == pytest.approx(start + passed / (450e9 * known.link))
    more = 2.0 * 3 * 2 * 4 * 64  # bytes a token of this rank
    for each in others:
        assert layer_kept(DENSE, setup) - layer_kept(DENSE, each) == more
        full = [recomputed_bytes(DENSE, replace(one, checkpoint="full")) for one in (setup, each)]
        assert full[0] - full[1] == 1024 * more
    assert layer_kept(DENSE, replace(setup, checkpoint="full")) == layer_kept(
        DENSE, replace(others[0], checkpoint="full")
    )
    assert layer_kept(DENSE, replace(setup, context=1)) == layer_kept(DENSE, replace(others[0], context=1))


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({"expert": 3, "data": 4}, "3 expert ranks of 1 devices do not divide the 4 devices of a stage"),
        ({"imbalance": 2.0}, "imbalance must be between 1 and the number of expert ranks, 1; got 2.0"),
        ({"context_kind": "rings"}, "context_kind must be one of ring, all-to-all, gather; got 'rings'"),
        ({"context": 3}, "a sequence of 4096 tokens does not divide into 3 parts"),
        ({"context": 32, "context_kind": "all-to-all"}, "context=32 ranks do not divide the 16 heads of a tensor rank"),
        ({"expert": 32, "data": 32}, "expert=32 does not divide 16 experts: the nearest that works is 16"),
        ({"expert_tensor": 3, "data": 3}, "expert_tensor=3 does not divide an expert's width of 2048"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(setup: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(MIXTURE, make_schedule("1f1b", ranks=1, microbatches=1), Setup(**setup))


def test_a_model_without_experts_has_no_expert_ranks() -> None:
    with pytest.raises(UsageError, match="a model without experts cannot have 2 expert ranks"):
        plan(DENSE, make_schedule("1f1b", ranks=1, microbatches=1), Setup(data=2, expert=2))


def test_devices_that_share_an_expert_gather_its_tokens_and_a_full_rank_takes_longer() -> None:
    """Two devices of an expert: each sends 2048 tokens of 2 KiB twice, and gathers what both got."""
    setup = Setup(tensor=2, data=4, expert=4, expert_tensor=2)
    mesh, known, sent = Mesh.of(setup, 1, 8), rates(setup), 2048 * 2 * 2048
    one, gathered = known.exchange(RankGroup(4, 4), sent, sent), known.tensor_sum(RankGroup(2, 2), 2 * sent)
    even = expert_exchange(MIXTURE, setup, mesh, known)
    assert even == pytest.approx((2 * one.seconds + gathered, 2 * one.taken + known.taken(2 * sent)))
    full = expert_exchange(MIXTURE, replace(setup, imbalance=1.5), mesh, known)
    assert full == pytest.approx((1.5 * even.seconds, 1.5 * even.taken))
