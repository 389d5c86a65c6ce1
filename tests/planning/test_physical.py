"""The physical cost of a layout: against published steps, and against what must hold for any cluster."""

from __future__ import annotations

from dataclasses import replace
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow import GPT, PRECISIONS, Placement, Setup, UsageError, make_schedule, plan, simulate, with_offload
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device import DEVICES, Device
from pipeflow.planning.efficiency import PUBLISHED, REACHES, SHARES, Efficiency
from pipeflow.planning.layer_seconds import model_layer_times
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import head_rates, physical_costs, rates_of
from pipeflow.planning.rates import RankGroup, Rates
from pipeflow.planning.setup import Checkpoint
from pipeflow.planning.work import MatrixProduct, head_work, layer_work, recomputed_work
from tests.covering import some

A100 = Cluster.of("a100-80gb")
FAST = Cluster.of("a100-80gb", link_bandwidth=1e14, network_bandwidth=1e14, link_latency=0, network_latency=0)
FREE = replace(FAST, efficiency={"collective": 0, "sync": 0, "transfer_start": 0})
SMALL = GPT(layers=8, hidden=1024, heads=16)

# arXiv 2205.05198, table 5: seconds of a step with full recomputation, and with selective and sequence parallelism
TABLE_5 = {
    "megatron-22b": (GPT(48, 6144, 64, 2048, 51200), (1, 1, 4, 4), (1.42, 1.10)),
    "gpt3-175b": (GPT(96, 12288, 96, 2048, 51200), (8, 3, 1, 64), (18.13, 13.75)),
    "turing-530b": (GPT(105, 20480, 128, 2048, 51200), (35, 3, 1, 280), (49.05, 37.83)),
    "megatron-1t": (GPT(128, 25600, 160, 2048, 51200), (64, 1, 1, 512), (94.42, 71.49)),
}


@pytest.mark.parametrize("checkpoint", ["full", "selective"])
@pytest.mark.parametrize("name", some(TABLE_5, ["megatron-22b", "gpt3-175b"]))
@pytest.mark.slow
def test_the_steps_of_a_paper_are_planned_within_8_percent(name: str, checkpoint: Checkpoint) -> None:
    model, (ranks, chunks, size, batch), seconds = TABLE_5[name]
    family, options = ("interleaved-1f1b", {"chunks": chunks}) if chunks > 1 else ("1f1b", {})
    schedule = make_schedule(family, ranks=ranks, microbatches=batch // size, **options)
    setup = Setup(
        tensor=8,
        microbatch_size=size,
        precision=PRECISIONS["fp16"],
        checkpoint=checkpoint,
        sequence_parallel=checkpoint == "selective",
    )
    found = plan(model, schedule, setup, cluster=A100)
    assert found.step_seconds == pytest.approx(seconds[checkpoint == "selective"], rel=0.08)


def test_the_parts_of_a_step_are_its_whole_and_none_is_negative() -> None:
    schedule = make_schedule("interleaved-1f1b", ranks=4, microbatches=8, chunks=2)
    found = plan(SMALL, schedule, Setup(tensor=2, data=4), cluster=A100)
    assert found.step_parts is not None
    assert sum(found.step_parts) == pytest.approx(found.step_seconds)
    assert min(found.step_parts._replace(sharding=1)) > 0 == found.step_parts.sharding
    assert found.tokens_per_second == pytest.approx(found.tokens / sum(found.step_parts))


def test_one_device_communicates_nothing() -> None:
    found = plan(SMALL, make_schedule("1f1b", ranks=1, microbatches=4), cluster=A100)
    assert found.step_parts is not None
    assert found.step_parts.tensor == found.step_parts.transfer == found.step_parts.reduction == 0
    assert found.step_parts.bubble == pytest.approx(0, abs=1e-12)


def test_reductions_and_the_optimizer_take_what_their_bytes_take() -> None:
    """On 4 replicas: a ring over the gradients, and each byte of the state read and written."""
    rates, parameters, schedule = (
        Rates(A100, PUBLISHED, "bf16"),
        SMALL.parameters,
        make_schedule("1f1b", ranks=1, microbatches=4),
    )
    found = plan(SMALL, schedule, Setup(data=4), cluster=A100)
    sharded = plan(SMALL, schedule, Setup(data=4, zero=1), cluster=A100)
    assert found.step_parts is not None
    assert sharded.step_parts is not None
    assert found.step_parts.reduction == pytest.approx(rates.gradient_sum(RankGroup(4, 4), 2 * parameters))
    assert found.step_parts.optimizer == pytest.approx(rates.moving(parameters * (2 * 12 + 3 * 2 + 2)))
    assert sharded.step_parts.optimizer == pytest.approx(rates.moving(parameters * (2 * 12 / 4 + 3 * 2 + 2)))


def test_a_copy_to_the_host_takes_its_bytes_over_the_devices_link() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    cost = plan(SMALL, schedule, Setup(), cluster=A100).cost
    assert cost.offload == pytest.approx([size / 32e9 for size in cost.saved_bytes])
    assert cost.input_bytes == (0, *cost.activation_bytes[:3])
    offloaded = simulate(with_offload(schedule, cost), cost)
    assert max(offloaded.peak_bytes) < max(simulate(schedule, cost).peak_bytes)
    unknown = replace(A100, device=replace(A100.device, host_bandwidth=0))
    assert plan(SMALL, schedule, Setup(), cluster=unknown).cost.offload == ()


def test_two_ranks_sum_the_gradient_of_a_table_that_they_share() -> None:
    rates, schedule = Rates(A100, PUBLISHED, "bf16"), make_schedule("1f1b", ranks=2, microbatches=4)
    tied, own = (plan(replace(SMALL, tied=shared), schedule, cluster=A100).step_parts for shared in (True, False))
    assert tied is not None
    assert own is not None
    assert tied.reduction == pytest.approx(rates.gradient_sum(RankGroup(2, 2), 2 * 50304 * 1024))
    assert own.reduction == pytest.approx(0, abs=1e-12)


def test_transfers_between_nodes_use_the_network() -> None:
    placement = Placement.linear(2)
    near, far = (
        physical_costs(SMALL, placement, Setup(tensor=tensor), A100, mesh=Mesh(tensor, 2, 1, 8)).cost
        for tensor in (4, 8)
    )
    assert near.link(0, 1).bandwidth == A100.link_bandwidth * PUBLISHED.transfer
    assert far.link(0, 1).bandwidth == far.link(1, 0).bandwidth == A100.network_bandwidth * PUBLISHED.network
    assert near.activation_bytes == (2 * 1024 * 1024,) * 2  # a microbatch of 1 x 1024 tokens in bf16


def test_a_device_that_sends_alone_has_the_whole_network_card_of_its_node() -> None:
    def bandwidth(mesh: Mesh, per_nic: int) -> float:
        cluster = Cluster.of("v100-32gb", network_bandwidth=1.5e9, devices_per_nic=per_nic)
        half = Setup(tensor=mesh.tensor, data=mesh.data, precision=PRECISIONS["fp16"])
        cost = physical_costs(replace(SMALL, layers=16), Placement.linear(mesh.pipeline), half, cluster, mesh=mesh).cost
        return min(link.bandwidth for link in cost.links.values()) / (1.5e9 * PUBLISHED.network)

    assert bandwidth(Mesh(1, 16, 1, 8), 8) == 8  # one of the node's eight is the last stage of the node
    assert bandwidth(Mesh(2, 8, 1, 8), 8) == 4
    assert bandwidth(Mesh(8, 2, 1, 8), 8) == bandwidth(Mesh(1, 2, 8, 8, "data"), 8) == 1
    assert bandwidth(Mesh(2, 8, 1, 8), 4) == 4  # two senders, two cards
    assert bandwidth(Mesh(2, 8, 1, 8), 1) == 1


def test_free_communication_takes_no_time() -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    found = plan(GPT.named("gpt3-175b"), schedule, Setup(tensor=8, data=2), cluster=FREE)
    assert found.step_parts is not None
    assert found.step_parts.tensor + found.step_parts.transfer + found.step_parts.reduction < 1e-2 * sum(
        found.step_parts
    )


@pytest.mark.parametrize("name", ["link_bandwidth", "network_bandwidth"])
def test_a_faster_link_is_never_slower(name: str) -> None:
    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    setup = Setup(tensor=4, data=4)
    slow, fast = (
        plan(SMALL, schedule, setup, cluster=Cluster.of("a100-80gb", **{name: rate})).step_seconds
        for rate in (1e9, 1e12)
    )
    assert slow is not None
    assert fast is not None
    assert fast < slow


def test_a_layer_takes_at_least_its_launch() -> None:
    tiny, schedule = GPT(layers=4, hidden=64, heads=4, positions=64), make_schedule("1f1b", ranks=1, microbatches=1)
    found = plan(tiny, schedule, cluster=A100)
    launches = 4 * (PUBLISHED.forward_launch + PUBLISHED.backward_launch)
    assert launches < found.timeline.makespan < 2 * launches


def test_recomputation_and_split_backwards_cost_what_they_compute() -> None:
    placement, mesh, large = Placement.linear(1), Mesh(1, 1, 1, 8), GPT(4, 8192, 64, 2048)
    none, full = (
        physical_costs(large, placement, Setup(checkpoint=kept, microbatch_size=16), A100, mesh=mesh).cost
        for kept in ("none", "full")
    )
    layers = none.forward[0] - (full.forward[0] + full.backward_input[0] - none.forward[0] - none.backward_input[0])
    assert 0 < layers < none.forward[0]  # what is computed again is the layers' forward, not the head's
    assert full.backward_weight == pytest.approx(none.backward_weight)
    assert none.backward_input[0] + none.backward_weight[0] == pytest.approx(2 * none.forward[0], rel=0.04)


def test_large_products_reach_their_share_of_the_peak_and_small_ones_less() -> None:
    rates = Rates(A100, PUBLISHED, "bf16")
    large, small = MatrixProduct(1e6, 1e6, 1e6), MatrixProduct(128, 128, 128)
    assert large.flops / rates.product(large) == pytest.approx(312e12 * PUBLISHED.products, rel=1e-3)
    assert small.flops / rates.product(small) < 0.3 * 312e12
    assert rates.product(small._replace(repeats=7)) == pytest.approx(7 * rates.product(small))


def test_short_products_wait_for_memory_where_operations_are_fast() -> None:
    """What a short product loses of the rate of a large one grows with the operations for each byte."""
    short, large = MatrixProduct(1e6, 1e6, 1024), MatrixProduct(1e6, 1e6, 1e6)
    lost = {}
    for name in ("a100-80gb", "h100-80gb"):
        cluster = Cluster.of(name)
        rates = rates_of(cluster, Setup())
        lost[name] = rates.product(short) * large.flops / short.flops / rates.product(large) - 1
    ratio = Device.named("h100-80gb").intensity("bf16") / Device.named("a100-80gb").intensity("bf16")
    assert 1.5 < ratio < 2.5
    assert lost["h100-80gb"] / lost["a100-80gb"] == pytest.approx(ratio, rel=0.01)
    assert Device.named("v100-32gb").intensity("bf16") == 0  # no units


def test_gradients_of_weights_are_added_up_once_for_each_microbatch() -> None:
    """A small microbatch pays as much for it as a large one; with gradients in float32 more."""
    rates, added = Rates(A100, PUBLISHED, "bf16"), {}
    for size, name in ((1, "bf16"), (4, "bf16"), (1, "bf16-mixed")):
        work = layer_work(SMALL, Setup(microbatch_size=size, precision=PRECISIONS[name]))
        weight = rates.seconds(work).weight - rates.seconds(work._replace(added_bytes=0.0)).weight
        added[size, name] = weight / rates.moving(SMALL.linear_flops / 2)
    assert added == pytest.approx({(1, "bf16"): 6, (4, "bf16"): 6, (1, "bf16-mixed"): 10})
    both = layer_work(SMALL, Setup(engine="deepspeed", precision=PRECISIONS["bf16-mixed"]))
    assert both.added_bytes == 26 * SMALL.linear_flops / 2
    weights, once = SMALL.linear_flops / 2, Setup(data=4, zero=3, reduce_once=True)
    assert layer_work(SMALL, once).added_bytes == 6 * weights


def test_divided_gradients_go_through_a_buffer() -> None:
    """FSDP copies a layer's gradients there and divides them, two reads and writes of each; then ranks add up parts."""
    weights = SMALL.linear_flops / 2
    assert layer_work(SMALL, Setup(data=4, zero=3)).added_bytes == weights * (4 * 2 + 6 / 4)
    assert layer_work(SMALL, Setup(data=4, zero=1)).added_bytes == weights * 6


def test_the_loss_of_torch_moves_less_than_that_of_megatron() -> None:
    """torch's cross_entropy: a float32 copy of the logits (6 bytes of each), and log_softmax (8)."""
    logits = SMALL.positions * SMALL.head_outputs(1)
    for setup, moved in (
        (Setup(), 14),
        (Setup(engine="torchtitan", precision=PRECISIONS["bf16-mixed"]), 14),
        (Setup(engine="megatron"), 32),
        (Setup(precision=PRECISIONS["fp16"]), 32),
    ):
        assert head_work(SMALL, setup).moved_bytes == moved * logits


@pytest.mark.parametrize("tensor", [1, 2])
def test_recomputation_of_torch_stops_before_the_last_product(tensor: int) -> None:
    """And before the sum of tensor ranks that follows it. Megatron-LM computes the whole layer again."""
    rates, setup = (
        rates_of(A100, Setup()),
        Setup(tensor=tensor, microbatch_size=64, checkpoint="full", attention="flash2"),
    )
    mesh = Mesh(tensor, 1, 1, 8)
    times = {
        engine: model_layer_times(SMALL, replace(setup, engine=engine), mesh, rates)
        for engine in ("megatron", "torchtitan")
    }
    last = rates.product(layer_work(SMALL, setup).products[-1])
    last += rates.tensor_sum(mesh.tensor_group, 64 * SMALL.positions * SMALL.hidden * 2)
    assert times["megatron"][1] - times["torchtitan"][1] == pytest.approx(last)
    assert times["megatron"][0] == times["torchtitan"][0]
    asked = model_layer_times(SMALL, replace(setup, early_stop=False), mesh, rates)
    assert asked[1] == pytest.approx(times["megatron"][1])


def test_products_in_8_bits_round_what_they_read() -> None:
    half, eight = (layer_work(SMALL, Setup(precision=PRECISIONS[name])) for name in ("bf16", "fp8"))
    read = sum(each.rows * each.depth for each in eight.products)
    assert eight.moved_bytes - half.moved_bytes == 4 * read


def test_tensor_ranks_hide_all_but_a_part_of_their_communication_where_engines_do() -> None:
    def communicating(overlap: bool, tensor: int = 4, cluster: Cluster = A100) -> float:
        wide, setup = GPT(8, 8192, 64), Setup(tensor=tensor, sequence_parallel=True, overlap=overlap)
        mesh = Mesh(tensor, 2, 1, 8)
        return physical_costs(wide, Placement.linear(2), setup, cluster, mesh=mesh).communication[0]

    assert communicating(overlap=True) < 0.5 * communicating(overlap=False)
    slow = replace(A100, link_bandwidth=1e9)  # over which it lasts longer than the computations beside it
    assert (
        0.9 * communicating(False, cluster=slow)
        < communicating(True, cluster=slow)
        < communicating(False, cluster=slow)
    )
    assert communicating(True, tensor=16) == communicating(False, tensor=16)  # two nodes share no links
    assert not Setup(tensor=4, overlap=True).hides_tensor
    assert not Setup(tensor=4, sequence_parallel=True, zero=3).hides_tensor
    assert Setup(tensor=4, sequence_parallel=True, precision=PRECISIONS["fp8"]).hides_tensor


def test_a_ring_over_nodes_uses_the_network_of_all_its_ranks_in_a_node() -> None:
    rates = Rates(replace(A100, network_latency=0.0, link_latency=0.0), replace(PUBLISHED, collective=0.0), "bf16")
    within, alone = rates.gradient_sum(RankGroup(8, 8), 1e9), rates.gradient_sum(RankGroup(8, 1), 1e9)
    assert within == pytest.approx(2 * 7 / 8 * 1e9 / (A100.link_bandwidth * PUBLISHED.link))
    assert alone == pytest.approx(2 * 7 / 8 * 1e9 / (A100.network_bandwidth * PUBLISHED.reduction))
    assert rates.gradient_sum(RankGroup(8, 2), 1e9) == pytest.approx(alone / 2)
    assert rates.gradient_sum(RankGroup(1, 1), 1e9) == 0


def test_gradients_in_one_buffer_are_reduced_as_fast_as_other_tensors() -> None:
    """By Megatron-LM, unless the rate of reductions was measured. A precision does not say how gradients lie."""
    setups = [Setup(precision=PRECISIONS["bf16-mixed"], engine=each) for each in (None, "torchtitan", "megatron")]
    found = [rates_of(A100, each).efficiency for each in setups]
    assert [each.reduction for each in found] == [PUBLISHED.reduction, PUBLISHED.reduction, PUBLISHED.network]
    assert {each.network for each in found} == {PUBLISHED.network}
    measured = replace(A100, efficiency={"reduction": 0.4})
    assert rates_of(measured, setups[-1]).efficiency.reduction == 0.4


def test_a_part_takes_a_hop_for_each_rank_and_another_one_for_each_node() -> None:
    """8 ranks in 2 nodes: 6 hops in nodes and 2 between them, in both rounds of a sum, and once to gather."""
    rates = Rates(replace(A100, network_latency=1.0, link_latency=0.25), replace(PUBLISHED, collective=0.5), "bf16")
    group = RankGroup(8, 4)
    assert rates.reduction(group, 1.0).seconds == pytest.approx(0.5 + 2 * (6 * 0.25 + 2 * 1.0))
    assert rates.reduction(group, 1.0, rounds=1) == rates.reduction(group, 1.0).part(2)
    assert rates.reduction(RankGroup(4, 4), 1.0).seconds == pytest.approx(0.5 + 2 * 3 * 0.25)
    assert rates.reduction(group, 8.0).taken == rates.taken(2 * 7)


def test_a_mesh_counts_the_ranks_of_a_group_in_a_node() -> None:
    mesh = Mesh(tensor=2, pipeline=4, data=4, per_node=8)
    assert (mesh.tensor_group, mesh.data_group) == (RankGroup(2, 2), RankGroup(4, 1))
    assert [mesh.crosses(rank, rank + 1) for rank in range(3)] == [False] * 3
    halves = Mesh(tensor=4, pipeline=4, data=1, per_node=8)
    assert [halves.crosses(rank, rank + 1) for rank in range(3)] == [False, True, False]
    outside = replace(mesh, inner="data")
    assert outside.data_group == RankGroup(4, 4)
    assert [outside.crosses(rank, rank + 1) for rank in range(3)] == [True] * 3
    assert Mesh(tensor=16, pipeline=1, data=1, per_node=8).tensor_group == RankGroup(16, 8)


def test_work_is_shared_out_over_tensor_ranks() -> None:
    whole, part = layer_work(SMALL, Setup()), layer_work(SMALL, Setup(tensor=4, sequence_parallel=True))
    flops = [sum(product.flops for product in each.products) for each in (whole, part)]
    assert flops[0] == 4 * flops[1] == SMALL.linear_flops * SMALL.positions
    assert whole.moved_bytes == 4 * part.moved_bytes
    mixture = replace(SMALL, experts=8, experts_per_token=2)
    routed = layer_work(mixture, Setup())
    assert sum(product.flops for product in routed.products) == pytest.approx(mixture.linear_flops * SMALL.positions)


def test_scores_are_stored_in_old_programs_alone() -> None:
    assert layer_work(SMALL, Setup()).score_bytes == 0
    for unfused in (Setup(keep_scores=True), Setup(checkpoint="selective"), Setup(precision=PRECISIONS["fp16"])):
        assert layer_work(SMALL, unfused).score_bytes > 0
        assert layer_work(SMALL, unfused).attention_flops == 2 * layer_work(SMALL, Setup()).attention_flops


def test_the_backward_of_fused_attention_computes_scores_again() -> None:
    """Five products for two (arXiv 2205.14135); with stored scores four."""
    rates = Rates(A100, replace(PUBLISHED, attention=0.4), "bf16")
    for setup, times in ((Setup(), 2.5), (Setup(keep_scores=True), 2.0)):
        work = layer_work(SMALL, setup)._replace(products=(), moved_bytes=0.0, score_bytes=0.0, added_bytes=0.0)
        computed = rates.seconds(work)
        assert computed.backward == pytest.approx(times * computed.forward)


def test_fp8_leaves_attention_and_the_head_in_16_bits() -> None:
    cluster, fp8 = Cluster.of("h100-80gb"), Setup(precision=PRECISIONS["fp8"])
    slow, fast = (rates_of(cluster, setup) for setup in (Setup(), fp8))
    attention = layer_work(SMALL, fp8)._replace(products=(), moved_bytes=0.0)
    assert fast.seconds(attention) == slow.seconds(attention)
    assert head_rates(fast) == slow
    mesh = Mesh(1, SMALL.layers, 1, 8)
    cut = [(0, 1), *((layer, layer + 1) for layer in range(1, SMALL.layers))]
    heads = []
    for setup in (Setup(), fp8):
        cost = physical_costs(SMALL, Placement.linear(SMALL.layers), setup, cluster, mesh=mesh, cut=cut).cost
        heads.append(cost.forward[-1] - cost.forward[1])
    assert heads[0] == pytest.approx(heads[1])


def test_recipes_of_8_and_4_bits_differ_in_their_products_alone() -> None:
    b200 = Cluster.of("b200")
    bf16, fp8, mxfp8, nvfp4 = (Setup(precision=PRECISIONS[name]) for name in ("bf16", "fp8", "mxfp8", "nvfp4"))
    half, eight, four = (rates_of(b200, setup) for setup in (bf16, fp8, nvfp4))
    assert rates_of(b200, mxfp8) == eight
    assert (eight.peak, four.peak) == (2 * half.peak, 4 * half.peak)
    assert half.attention_peak == eight.attention_peak == four.attention_peak
    assert head_rates(four) == half


def test_a_refused_precision_names_all_in_which_the_device_computes() -> None:
    for device in DEVICES:
        said, runs = [], []
        for name, precision in PRECISIONS.items():
            try:
                rates_of(Cluster.of(device), Setup(precision=precision))
                runs.append(name)
            except UsageError as error:
                said.append((name, str(error)))
        for name, text in said:
            assert text.startswith(f"{device} has no units for {name}: use one of {', '.join(runs)}, or describe")


def test_devices_have_shares_of_their_own() -> None:
    assert Efficiency.of({}, "h100", "bf16").products < PUBLISHED.products
    assert Efficiency.of({}, "a100", "bf16") == Efficiency.of({}) == PUBLISHED
    assert Efficiency.of({"products": 0.9}, "h100", "bf16").products == 0.9  # what was measured goes first
    for like, shares in REACHES.items():
        known = [device for device in DEVICES.values() if device.like == like]
        assert known, like
        assert all(any(precision in device.flops for device in known) for precision in shares)
    assert {name for name, device in DEVICES.items() if device.like == "h100"} == {
        *("h100-80gb", "h100-64gb", "h100-96gb", "h100-pcie", "h100-nvl", "h800", "h200")
    }


def test_a_device_reaches_what_its_row_says_whatever_its_name() -> None:
    """Seconds of a layer: of one that is like H100, more at the same rates."""
    times = []
    for like in ("a100", "h100"):
        cluster = replace(A100, device=replace(Device.named("h100-80gb"), name="x900", like=like))
        times.append(
            physical_costs(SMALL, Placement.linear(1), Setup(), cluster, mesh=Mesh(1, 1, 1, 8)).cost.forward[0]
        )
    assert times[0] < times[1]
    with pytest.raises(UsageError, match="unknown measured device 'b300'"):
        replace(A100.device, like="b300")


def test_sequence_parallel_stages_pass_parts() -> None:
    whole, parts = (
        physical_costs(
            SMALL, Placement.linear(2), Setup(tensor=4, sequence_parallel=split), A100, mesh=Mesh(4, 2, 1, 8)
        )
        for split in (False, True)
    )
    assert whole.cost.activation_bytes[0] == 4 * parts.cost.activation_bytes[0]


@pytest.mark.parametrize("name", sorted(SHARES))
def test_coefficients_that_cannot_be_are_refused(name: str) -> None:
    for number in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match=name):
            Efficiency.of({name: number})


def seconds_without_the_optimizer(cluster: Cluster, ranks: int, microbatches: int) -> float:
    parts = plan(SMALL, make_schedule("1f1b", ranks=ranks, microbatches=microbatches), cluster=cluster).step_parts
    assert parts is not None
    assert min(parts) >= -1e-12
    return sum(parts) - parts.optimizer - parts.reduction


def test_ranks_that_share_processors_use_what_others_leave() -> None:
    """4 ranks on 2 processors: with one microbatch, one rank computes at a time, twice as fast as if all did."""
    shared = replace(FREE, sharing=2.0, devices_per_node=4)
    took, alone = (seconds_without_the_optimizer(cluster, 4, 1) for cluster in (shared, FREE))
    assert took == pytest.approx(alone / 2, rel=1e-4)
    took, alone = (seconds_without_the_optimizer(cluster, 4, 64) for cluster in (shared, FREE))
    timeline = plan(SMALL, make_schedule("1f1b", ranks=4, microbatches=64), cluster=FREE).timeline
    computed = sum(span.end - span.start for span in timeline) / 4  # of a rank, and both processors are busy
    assert computed < took < alone
    assert took == pytest.approx(computed, rel=0.15)  # the last rank, which has the head, has most to do


def test_fewer_ranks_than_a_node_has_places_for_share_less() -> None:
    shared = replace(FREE, sharing=2.0, devices_per_node=4)
    took, alone = (seconds_without_the_optimizer(cluster, 2, 8) for cluster in (shared, FREE))
    assert took == pytest.approx(alone / 2, rel=1e-4)  # each has its own processor


def test_a_device_that_does_not_run_ahead_launches_and_computes_in_turn() -> None:
    cpu = replace(FREE, device=replace(FREE.device, runs_ahead=False), efficiency={"sync": 1e-3, "collective": 0})
    placement, mesh = Placement.linear(1), Mesh(2, 1, 1, 8)
    for tensor, sums in ((1, 0), (2, 1)):
        setup = Setup(tensor=tensor)
        ahead, both = (
            physical_costs(SMALL, placement, setup, cluster, mesh=replace(mesh, tensor=tensor)).cost
            for cluster in (FREE, cpu)
        )
        work = Rates(FREE, Efficiency.of({"collective": 0}), "bf16").seconds(layer_work(SMALL, setup)).forward
        assert work < PUBLISHED.forward_launch  # so the time of a layer is that of its launch where hosts run ahead
        longer = SMALL.layers * (work + 2 * sums * 1e-3) + sums * 1e-3  # and the embedding has a sum
        assert both.forward[0] - ahead.forward[0] == pytest.approx(longer, rel=1e-2)


def test_gradients_the_optimizer_and_backwards_have_coefficients_of_their_own() -> None:
    own = replace(PUBLISHED, gradients=PUBLISHED.link / 2, optimizer=PUBLISHED.memory / 3, backward=1.5)
    quick = replace(A100, link_latency=0.0)
    usual, other = (Rates(quick, replace(known, collective=0.0), "bf16") for known in (PUBLISHED, own))
    group, work = RankGroup(4, 4), layer_work(SMALL, Setup(keep_scores=True))._replace(added_bytes=0.0)
    assert other.gradient_sum(group, 1e9) == pytest.approx(2 * usual.gradient_sum(group, 1e9))
    assert other.tensor_sum(group, 1e9) == usual.tensor_sum(group, 1e9)
    assert other.stepping(1e9) == pytest.approx(3 * usual.stepping(1e9))
    assert usual.stepping(1e9) == usual.moving(1e9) == other.moving(1e9)
    assert usual.seconds(work).backward == pytest.approx(2 * usual.seconds(work).forward)
    assert other.seconds(work).backward == pytest.approx(1.5 * usual.seconds(work).forward)


def test_unknown_coefficients_and_two_ways_to_say_how_fast_are_refused() -> None:
    schedule = make_schedule("1f1b", ranks=1, microbatches=1)
    with pytest.raises(UsageError, match="unknown efficiency warp; known: products"):
        plan(SMALL, schedule, cluster=replace(A100, efficiency={"warp": 9.0}))
    with pytest.raises(UsageError, match="flops and cluster"):
        plan(SMALL, schedule, cluster=A100, flops=1e12)
    with pytest.raises(UsageError, match="v100-32gb has no units for bf16: use one of float32, fp16"):
        plan(SMALL, schedule, cluster=Cluster.of("v100-32gb"))


def test_a_mixture_moves_its_tokens_to_the_experts_and_back() -> None:
    """Beside what a model of one MLP as wide as those that a token uses moves."""
    mixture = replace(SMALL, experts=8, experts_per_token=2, ffn=2 * SMALL.hidden)
    plain = replace(SMALL, ffn=4 * SMALL.hidden)
    setup = Setup(microbatch_size=2)
    tokens = 2 * SMALL.positions
    more = layer_work(mixture, setup).moved_bytes - layer_work(plain, setup).moved_bytes
    assert more == 4 * 2 * tokens * SMALL.hidden * setup.precision.weight


@settings(max_examples=60, deadline=None)
@given(
    hidden=st.sampled_from([256, 1024, 4096]),
    sequence=st.sampled_from([64, 256, 1024]),
    checkpoint=st.sampled_from(["none", "selective", "full"]),
    tensor=st.sampled_from([1, 2]),
    name=st.sampled_from(["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"]),
    runs_ahead=st.booleans(),
    slow=st.tuples(*[st.floats(0.05, 4)] * 4),
    faster=st.tuples(*[st.floats(1, 4)] * 4),
)
@pytest.mark.slow
def test_no_faster_chip_or_link_makes_a_step_slower(
    hidden: int,
    sequence: int,
    checkpoint: Checkpoint,
    tensor: int,
    name: str,
    runs_ahead: bool,
    slow: tuple[float, ...],
    faster: tuple[float, ...],
) -> None:
    """Nor the halves of a backward, on any stage."""
    model = GPT(layers=8, hidden=hidden, heads=8)
    setup = Setup(tensor=tensor, data=2, sequence=sequence, checkpoint=checkpoint)
    schedule = make_schedule(name, ranks=4, microbatches=8)

    def cluster(rates: tuple[float, ...]) -> Cluster:
        products, memory, link, network = rates
        flops = {kind: products * rate for kind, rate in A100.device.flops.items()}
        bandwidth = memory * A100.device.memory_bandwidth
        device = replace(A100.device, flops=flops, memory_bandwidth=bandwidth, runs_ahead=runs_ahead)
        return Cluster(device, devices_per_node=4, link_bandwidth=link * 300e9, network_bandwidth=network * 25e9)

    one, other = (
        plan(model, schedule, setup, cluster=cluster(rates)) for rates in (slow, tuple(map(mul, slow, faster)))
    )
    assert one.step_seconds is not None
    assert other.step_seconds is not None
    assert other.step_seconds <= one.step_seconds * (1 + 1e-9)
    for half in ("forward", "backward_input", "backward_weight"):
        times = zip(getattr(one.cost, half), getattr(other.cost, half), strict=True)
        assert all(after <= before * (1 + 1e-9) for before, after in times)


def test_layers_of_single_operations_move_what_their_kernels_would_not() -> None:
    """Per token of a Llama with 8 heads of 64, 2 of them for keys: two norms of 16 more numbers for each of 512, 8 for
    each of 512 + 128 where positions are applied, and 2 for each of 1024 in a gate. GPT-2 has kernels for all it has.
    """
    llama = GPT(1, 512, 8, 128, kv_heads=2, ffn=1024, gated=True, norm="rms", position_table=False)
    eager, fused = (layer_work(llama, Setup(eager=each)) for each in (True, False))
    assert eager.products == fused.products
    assert eager.moved_bytes - fused.moved_bytes == 2 * 128 * (2 * 16 * 512 + 8 * 640 + 2 * 1024)
    again = [recomputed_work(llama, Setup(eager=each, checkpoint="op")).moved_bytes for each in (True, False)]
    assert again[0] - again[1] == eager.moved_bytes - fused.moved_bytes
    old = GPT(1, 512, 8, 128)
    assert layer_work(old, Setup(eager=True)) == layer_work(old, Setup())
