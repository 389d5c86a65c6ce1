"""Divided weights, gradients and states (ZeRO, FSDP): seconds and bytes, from examples that are computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeflow import GPT, PRECISIONS, Setup, UsageError, make_schedule, plan, with_unshard
from pipeflow.core.action import Kind
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.device import Device
from pipeflow.planning.efficiency import PUBLISHED
from pipeflow.planning.kept import layer_kept
from pipeflow.planning.layout import Wanted
from pipeflow.planning.layouts import find_layouts
from pipeflow.planning.rates import Exchange, RankGroup, Rates
from pipeflow.planning.sharding import Sharding, StageLayers
from pipeflow.planning.shares import Parameters
from pipeflow.planning.step_plan import Plan
from pipeflow.schedules.orders.additions import gathering

# links of 1e6 bytes/s without latency, so that a gather of b bytes on n ranks takes (n - 1) / n * b / 1e6 seconds, and
# the memory moves each byte so often that this takes a quarter as long
SIMPLE = replace(
    Cluster.of(Device("simple", {"bf16": 1e12}, 80e9, 1e12), link_bandwidth=1e6, network_bandwidth=1e6),
    link_latency=0.0,
    network_latency=0.0,
    efficiency={"link": 1.0, "reduction": 1.0, "collective": 0.0, "contention": 0.25 * 1e12 / 1e6},
)
A100 = Cluster.of("a100-80gb")
SMALL = GPT(layers=8, hidden=1024, heads=16)
LAYER = 12 * 1024**2 + 13 * 1024  # parameters of one of its layers
ENDS = SMALL.parameters - 8 * LAYER


def sharding(*, by_layer: bool = True, in_node: int = 4, **options: Any) -> Sharding:
    overlap = None if options.get("zero") == 3 else False
    setup = Setup(**{"data": 4, "precision": PRECISIONS["bf16-mixed"], "overlap": overlap, **options})
    known = replace(PUBLISHED, **SIMPLE.efficiency)
    holders = RankGroup(setup.data, in_node), RankGroup(setup.expert_replicas, in_node // setup.expert)
    return Sharding(setup, holders, Rates(SIMPLE, known, "bf16"), by_layer)


def others(count: float) -> Parameters:
    return Parameters(int(count), 0)


LAYERS = StageLayers(4, others(1e6), others(2e6), forward=10.0, backward=20.0)


def test_a_gather_sends_what_the_other_ranks_hold_and_a_reduction_the_bytes_of_gradients() -> None:
    """1e6 parameters are 2e6 bytes of weights and 4e6 of gradients; 3 of 4 parts come from others, at 1e6 bytes/s."""
    assert sharding(zero=3).gather(others(1e6)).seconds == pytest.approx(1.5)
    assert sharding(zero=3).scatter(others(1e6)).seconds == pytest.approx(3.0)
    half = {engine: sharding(zero=3, precision=PRECISIONS["bf16"], engine=engine) for engine in (None, "torchtitan")}
    assert [each.scatter(others(1e6)).seconds for each in half.values()] == pytest.approx([1.5, 3.0])  # in float32


def test_experts_are_gathered_from_the_ranks_that_hold_the_same_ones() -> None:
    """Each expert is on 2 of 4 ranks: of 2e6 bytes of weights, 1 of 2 parts comes from the other one."""
    assert sharding(zero=3, expert=2).gather(Parameters(0, 1_000_000)).seconds == pytest.approx(1.0)


def test_hybrid_shards_gather_in_a_node_and_sum_their_part_between_nodes() -> None:
    """Of 8 ranks in 2 nodes, 4 hold all weights: 2e6 bytes come from 3 of 4 in 1.5 s. A reduction takes 3 s in the
    node, and the sum of a quarter of 4e6 bytes with the copy in the other node 2 x 1/2 x 1e6 bytes: 1 s.
    """
    hybrid = sharding(zero=3, data=8, shard_ranks=4)
    assert hybrid.gather(others(1e6)).seconds == pytest.approx(1.5)
    assert hybrid.scatter(others(1e6)).seconds == pytest.approx(4.0)
    assert sharding(zero=3, data=8).gather(others(1e6)).seconds == pytest.approx(7 / 8 * 2)


def test_collectives_take_memory_from_the_computations_beside_them_for_each_byte() -> None:
    """2e6 bytes take 0.5 s of the memory, however long they are on their way. A collective that outlasts computations
    hides all of it.
    """
    rates = sharding().rates
    assert rates.added(10.0, Exchange(2.0, rates.taken(2e6))) == pytest.approx(0.5)
    assert rates.added(10.0, Exchange(8.0, rates.taken(2e6))) == pytest.approx(0.5)
    assert rates.added(1.0, Exchange(2.0, rates.taken(2e6))) == 1.0


def test_layers_hide_all_gathers_but_the_first_and_all_reductions_but_the_last() -> None:
    """4 layers of 1e6 parameters: a gather takes 1.5 s, a reduction 3 s. Ends of 2e6 parameters take twice as much."""
    forward = 3 * (0.25 * 1.5) + 1.5 + 3.0  # contention beside three gathers, the first one, that of the ends
    backward = 3 * (0.25 * 4.5) + 0.25 * 1.5 + 3.0 + 6.0  # of a gather and a reduction; the last reductions
    assert sharding(zero=3, prefetch=True).beyond(LAYERS) == pytest.approx((forward, backward))
    assert sharding(zero=3).beyond(LAYERS) == pytest.approx((forward, 4 * 4.5 + 6.0))  # a backward hides nothing
    assert sharding(zero=3, overlap=False).beyond(LAYERS) == pytest.approx((4 * 1.5 + 3.0, 4 * 4.5 + 6.0))
    assert sharding(zero=2).beyond(LAYERS) == pytest.approx((0.0, 4 * 3.0 + 6.0))
    assert sharding(zero=1).beyond(LAYERS) == (0.0, 0.0)


def test_what_comes_once_a_step_is_hidden_only_if_asked_for() -> None:
    """6e6 parameters in 4 layers: a sum of gradients takes 36 s, each of its rounds 18, a gather of weights 9. Beside
    computations, a fourth is left, and the others take a quarter of their time.
    """
    assert sharding(zero=0).once(others(6e6), LAYERS) == pytest.approx(36.0)
    assert sharding(zero=1).once(others(6e6), LAYERS) == pytest.approx(18.0 + 9.0)
    assert sharding(zero=2).once(others(6e6), LAYERS) == pytest.approx(9.0)
    assert sharding(zero=3).once(others(6e6), LAYERS) == 0.0
    assert sharding(zero=3, by_layer=False, overlap=False).once(others(6e6), LAYERS) == pytest.approx(18.0)
    left = 36 / 4 + 3 * 0.25 * 36 / 4
    assert sharding(zero=0, overlap=True).once(others(6e6), LAYERS) == pytest.approx(left)


def test_gradients_that_stay_whole_are_reduced_once() -> None:
    """Microbatches only gather: four layers twice, and the ends. The step reduces 6e6 parameters in 18 s."""
    once = sharding(zero=3, reduce_once=True, overlap=False)
    assert once.beyond(LAYERS) == pytest.approx((4 * 1.5 + 3.0, 4 * 1.5))
    assert once.once(others(6e6), LAYERS) == pytest.approx(18.0)
    [rank] = planned(zero=3, reduce_once=True).ranks
    assert rank.gradient_bytes == 2 * rank.parameters
    assert rank.gathered_bytes == 2 * (2 * LAYER + ENDS)


def planned(microbatches: int = 1, ranks: int = 1, name: str = "1f1b", **options: Any) -> Plan:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, **({"chunks": 4} if ranks > 1 else {}))
    return plan(SMALL, schedule, Setup(data=8, **options), cluster=A100)


def sharding_seconds(**options: Any) -> float:
    parts = planned(**options).step_parts
    assert parts is not None
    return parts.sharding


def test_each_microbatch_gathers_again() -> None:
    one = sharding_seconds(zero=3)
    assert one > 0
    assert sharding_seconds(zero=3, microbatches=4) == pytest.approx(4 * one)
    assert sharding_seconds(zero=3, overlap=False) > one
    assert sharding_seconds(zero=1) == 0


def test_a_layer_that_is_recomputed_is_gathered_once_in_its_backward() -> None:
    none, full = (sharding_seconds(zero=3, overlap=False, checkpoint=kept) for kept in ("none", "full"))
    assert none == pytest.approx(full)


@pytest.mark.parametrize(("zero", "divided"), [(1, 12), (2, 14), (3, 16)])
def test_each_stage_of_zero_divides_more_of_16_bytes(zero: int, divided: int) -> None:
    """Weights and gradients take 2 bytes, the states 12. Two layers and the ends are whole for a while: their gradients
    with ZeRO-2, their weights, too, with ZeRO-3. What a layer keeps is freed as its gradients are made.
    """
    [rank] = planned(zero=zero).ranks
    held = rank.weight_bytes + rank.gradient_bytes + rank.optimizer_bytes
    assert held == pytest.approx(SMALL.parameters * (16 - divided + divided / 8), rel=1e-6)
    units = 2 * LAYER + ENDS
    assert rank.gathered_bytes == {1: 0, 2: 2 * ENDS, 3: 2 * units + 2 * ENDS}[zero]
    [short] = planned(zero=zero, sequence=256).ranks  # activations are then less than gradients
    freed = 2 * 256 * layer_kept(SMALL, Setup())
    assert short.gathered_bytes == {1: 0, 2: 2 * units - freed, 3: 4 * units - freed}[zero]


def test_ranks_of_a_pipeline_gather_a_stage_for_several_microbatches_and_hold_three_of_them() -> None:
    found, whole = (planned(8, 2, "interleaved-1f1b", zero=zero) for zero in (3, 0))
    rank = found.ranks[1]  # four stages of one layer; the last one has the head, too
    stages = [LAYER, LAYER, LAYER + SMALL.vocabulary * SMALL.hidden + 2 * SMALL.hidden]
    assert rank.gathered_bytes == 2 * (sum(stages) + 2 * LAYER)  # two layers are also in buffers
    assert rank.gradient_bytes == whole.ranks[1].gradient_bytes
    assert rank.weight_bytes == pytest.approx(whole.ranks[1].weight_bytes / 8, rel=1e-6)
    assert found.step_parts is not None
    assert found.step_parts.sharding > 0
    assert sum(found.step_parts) == pytest.approx(found.step_seconds)


def test_a_stage_that_would_be_gathered_too_often_stays_whole() -> None:
    """Of four stages on a rank, three are whole, so the first one is gathered again for its only backward."""
    schedule = make_schedule("interleaved-1f1b", ranks=2, microbatches=1, chunks=4)
    with pytest.raises(UsageError, match="would be gathered more often"):
        with_unshard(schedule)
    gathered = gathering(schedule)
    numbers = [action.stage for rank in range(2) for action in gathered.actions(rank) if action.kind is Kind.U]
    assert sorted(numbers) == list(range(8))
    assert gathering(gathered) is gathered


@pytest.mark.parametrize("zero", [2, 3])
def test_a_search_lists_layouts_that_divide_gradients_and_weights(zero: int) -> None:
    task = Wanted(SMALL, A100, devices=8, batch=32, zero=zero, memory=4e9)
    found = find_layouts(task, top=3).ranked
    assert {each.layout.zero for each in found} == {zero}
    assert all(each.plan.peak_bytes <= 4e9 for each in found)
    if zero == 2:
        assert {each.layout.pipeline for each in found} == {1}


def test_a_search_lists_shards_within_a_node() -> None:
    task = Wanted(SMALL, A100, devices=16, batch=64, zero=3, shard_ranks=8, pipeline=1, tensor=1)
    [best] = find_layouts(task, top=1).ranked
    assert (best.layout.data, best.layout.setup.shards) == (16, 8)
