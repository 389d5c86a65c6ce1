"""Modules of a layer that are computed again, offloaded layers and CUDA graphs: bytes and times by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeflow import GPT, Placement, Setup, UsageError, make_schedule, plan
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.kept import layer_kept, recomputed_bytes
from pipeflow.planning.layer_seconds import expert_exchange
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import Physical, physical_costs, rates_of, stage_costs
from pipeflow.planning.setup import PRECISIONS
from pipeflow.planning.similar import kind_of, unpriced
from pipeflow.planning.work import layer_work

PLAIN: dict[str, Any] = {"gated": True, "biases": "none", "norm": "rms", "dropout": False, "tied": False}
DENSE = GPT(8, 4096, 32, 4096, 32000, kv_heads=8, ffn=8192, position_table=False, **PLAIN)
MIXTURE = replace(DENSE, experts=16, experts_per_token=2, ffn=2048, shared_experts=1)
LATENT = replace(DENSE, kv_heads=None, head_size=192, rope_size=64, value_size=128, kv_rank=512, q_rank=1536)
H100 = Cluster.of("h100-80gb")


@pytest.mark.parametrize(
    ("model", "module", "freed"),
    [
        (DENSE, "layernorm", 2 * 4096),
        (replace(DENSE, parallel_block=True), "layernorm", 4096),
        (DENSE, "mlp", 3 * 8192),
        (DENSE, "core_attn", 0),  # a fused kernel keeps nothing that the linears beside it do not need
        (DENSE, "moe", 0),
        (MIXTURE, "mlp", 0),
        (MIXTURE, "moe_act", 2 * 2048),
        (MIXTURE, "shared_experts", 3 * 2048),
        (MIXTURE, "moe", 2 * (2 * 4096 + 3 * 2048) + 16 + 3 * 2048),
        (LATENT, "mla_up_proj", 32 * (192 + 192 + 128)),
    ],
)
def test_a_module_that_is_computed_again_is_not_kept(model: GPT, module: str, freed: int) -> None:
    """In numbers of two bytes; while the backward of a layer runs, it has them."""
    kept, again = Setup(), Setup(recompute_modules=(module,))
    assert layer_kept(model, kept) - layer_kept(model, again) == 2 * freed
    assert recomputed_bytes(model, again) == 2 * freed * model.tokens


def test_a_module_within_another_counts_once() -> None:
    both = layer_kept(MIXTURE, Setup(recompute_modules=("moe", "moe_act", "shared_experts")))
    assert both == layer_kept(MIXTURE, Setup(recompute_modules=("moe",)))


def costs(model: GPT, setup: Setup) -> Physical:
    placement = Placement.linear(1)
    return physical_costs(model, placement, setup, H100)


def added(model: GPT, setup: Setup, *modules: str) -> float:
    """Seconds of a layer's backward that recomputing them adds."""
    more = replace(setup, recompute_modules=modules)
    one, other = (costs(model, each).cost.backward_input[0] for each in (setup, more))
    return (other - one) / model.layers


def test_backwards_take_as_much_longer_as_the_modules_take() -> None:
    setup = Setup(microbatch_size=4)
    rates, work = rates_of(H100, setup), layer_work(DENSE, setup)
    layer = rates.seconds(work)
    assert added(DENSE, setup, "core_attn") == pytest.approx(layer.scores)
    tokens = 4 * 4096
    products = sum(map(rates.product, work.products[2:]))
    assert added(DENSE, setup, "mlp") == pytest.approx(products + rates.moving(2 * 3 * 8192 * tokens))
    assert added(DENSE, setup, "layernorm") == pytest.approx(rates.moving(2 * 4 * 4096 * tokens))


def test_experts_that_are_computed_again_get_their_tokens_again() -> None:
    setup = Setup(microbatch_size=4, data=8, expert=8)
    rates, mesh = rates_of(H100, setup), Mesh.of(setup, 1, 8)
    sent = expert_exchange(MIXTURE, setup, mesh, rates).seconds
    products = sum(map(rates.product, layer_work(MIXTURE, setup).products[2:]))
    values = 3 * 3 * 2048 + 4 * 2 * 4096
    moved = rates.moving(2 * values * 4 * 4096)
    assert added(MIXTURE, setup, "moe") == pytest.approx(products + moved + sent)
    assert added(MIXTURE, setup, "moe_act") == pytest.approx(rates.moving(2 * 2 * 3 * 2048 * 4 * 4096))


def test_latent_vectors_make_their_heads_again() -> None:
    setup = Setup(microbatch_size=4)
    rates, products = rates_of(H100, setup), layer_work(LATENT, setup).products
    assert [(each.depth, each.columns) for each in products[:4]] == [
        (4096, 1536),
        (1536, 32 * 192),
        (4096, 512 + 64),
        (512, 32 * 256),
    ]
    moved = rates.moving(2 * 2 * 32 * (192 + 192 + 128) * 4 * 4096)
    both = rates.product(products[1]) + rates.product(products[3])
    assert added(LATENT, setup, "mla_up_proj") == pytest.approx(both + moved)


def test_without_a_device_the_operations_of_modules_count() -> None:
    def backward(*modules: str) -> float:
        return stage_costs(DENSE, Placement.linear(1), Setup(recompute_modules=modules), flops=1.0).backward_input[0]

    assert backward("mlp") - backward() == 8 * 4096 * 2 * 3 * 4096 * 8192
    assert backward("core_attn") - backward() == 8 * 4096 * DENSE.attention_flops(4096)


def test_some_layers_of_a_stage_have_a_checkpoint() -> None:
    none, half, full = (
        Setup(),
        Setup(checkpoint="full", checkpoint_layers=4),
        Setup(checkpoint="full"),
    )
    bytes_ = [costs(DENSE, each).cost.saved_bytes[0] for each in (none, half, full)]
    assert bytes_[1] == (bytes_[0] + bytes_[2]) / 2
    times = [costs(DENSE, each).cost.backward_input[0] for each in (none, half, full)]
    assert times[1] == pytest.approx((times[0] + times[2]) / 2)
    work = [stage_costs(DENSE, Placement.linear(1), each).backward_input[0] for each in (none, half, full)]
    assert work[1] == pytest.approx((work[0] + work[2]) / 2)


def test_offloaded_layers_leave_the_device_but_for_two() -> None:
    none, five = Setup(microbatch_size=2), Setup(microbatch_size=2, offload_layers=5)
    one, other = (costs(DENSE, each).cost for each in (none, five))
    assert one.saved_bytes[0] - other.saved_bytes[0] == 3 * 2 * 4096 * layer_kept(DENSE, none)
    slow = replace(H100, device=replace(H100.device, host_bandwidth=1e9))
    longer = physical_costs(DENSE, Placement.linear(1), five, slow).cost
    copied = 2 * 4096 * layer_kept(DENSE, none) / 1e9
    assert longer.forward[0] - one.forward[0] == pytest.approx(3 * copied - 3 / 8 * layers_forward(none))
    unknown = replace(H100, device=replace(H100.device, host_bandwidth=0.0))
    with pytest.raises(UsageError, match="has no host_bandwidth, which copies to the host take"):
        physical_costs(DENSE, Placement.linear(1), five, unknown)


def layers_forward(setup: Setup) -> float:
    rates = rates_of(H100, setup)
    return DENSE.layers * rates.seconds(layer_work(DENSE, setup)).forward


def test_cuda_graphs_save_launches() -> None:
    """Of a small layer, that takes as long as its launches."""
    small = replace(DENSE, hidden=256, heads=4, kv_heads=4, ffn=512, head_size=None)
    known = rates_of(H100, Setup()).efficiency

    def forward(*scopes: str) -> float:
        setup = Setup(sequence=128, cuda_graphs=scopes)
        one, two = (costs(replace(small, layers=layers), setup).cost.forward[0] for layers in (1, 2))
        return two - one

    assert forward() == pytest.approx(known.forward_launch)
    assert forward("attn") == pytest.approx(known.forward_launch / 2)
    assert forward("full_iteration") < known.forward_launch / 4


def test_frozen_weights_have_no_gradients_and_no_optimizer() -> None:
    """Of a model of bf16: two bytes a parameter, and no products for weights in a backward."""
    learns, frozen = Setup(microbatch_size=4, data=2), Setup(microbatch_size=4, data=2, frozen=True)
    one, other = costs(DENSE, replace(learns, attention="flash3")), costs(DENSE, frozen)
    assert other.cost.backward_weight[0] < 0.01 * one.cost.backward_weight[0]
    assert other.cost.backward_input == pytest.approx(one.cost.backward_input)
    assert other.cost.saved_bytes[0] < one.cost.saved_bytes[0]  # test_kept_bytes.py has how many
    for zero in (0, 1):
        assert costs(DENSE, replace(frozen, zero=zero)).cost.reduce == (0.0,)
    assert other.optimizer == other.tied == 0
    found = plan(DENSE, make_schedule("1f1b", ranks=1, microbatches=2), frozen, cluster=H100).ranks[0]
    assert (found.weight_bytes, found.gradient_bytes, found.optimizer_bytes) == (2 * DENSE.parameters, 0, 0)
    assert str(kind_of(DENSE, frozen, H100)) == "h100, 16 bits, frozen weights"
    work = stage_costs(DENSE, Placement.linear(1), frozen, flops=1.0)
    assert work.backward_weight == work.deferred_bytes == (0.0,)


def test_adapters_take_bytes_and_seconds() -> None:
    frozen, adapted = Setup(data=2, zero=1, frozen=True), Setup(data=2, zero=1, lora_rank=8)
    schedule = make_schedule("1f1b", ranks=1, microbatches=2)
    one, other = (plan(DENSE, schedule, setup, cluster=H100).ranks[0] for setup in (frozen, adapted))
    count = other.parameters - one.parameters
    assert 0 < count < 0.05 * one.parameters
    assert other.weight_bytes - one.weight_bytes == other.gradient_bytes == 2 * count
    assert other.optimizer_bytes == 12 * count / 2  # the two replicas divide it
    less, more = costs(DENSE, frozen), costs(DENSE, adapted)
    for before, after in zip(
        (*less.cost.forward, *less.cost.backward_input, *less.cost.backward_weight, *less.cost.reduce, less.optimizer),
        (*more.cost.forward, *more.cost.backward_input, *more.cost.backward_weight, *more.cost.reduce, more.optimizer),
        strict=True,
    ):
        assert before < after
    narrow = [Setup(precision=PRECISIONS[name], lora_rank=8) for name in ("bf16", "fp8")]
    assert len({costs(DENSE, setup).cost.saved_bytes for setup in narrow}) == 1  # adapters compute in 16 bits
    assert all("adapters" not in text for text in unpriced(DENSE, adapted))
    assert any("--lora-rank" in text for text in unpriced(DENSE, frozen))


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({"recompute_modules": ("mpl",)}, "recompute_modules must be of core_attn, .*; got 'mpl'"),
        ({"cuda_graphs": ("all",)}, "cuda_graphs must be of attn, .*; got 'all'"),
        ({"dispatcher": "flex"}, "dispatcher must be one of all-to-all, deepep, hybridep; got 'flex'"),
        ({"recompute_modules": ("mlp",), "checkpoint": "full"}, "checkpoint 'full' recomputes all modules"),
        ({"checkpoint_layers": 2}, "checkpoint_layers says how many layers have a checkpoint: give checkpoint, too"),
        ({"lora_rank": -1}, "lora_rank must be an integer of at least 0, got -1"),
        ({"lora_rank": 8, "lora_targets": ("q_proj",)}, "lora_targets must be of linear_qkv, .*; got 'q_proj'"),
        ({"lora_targets": ("linear_qkv",)}, "lora_targets says which linears have adapters: give lora_rank, too"),
        ({"offload_layers": -1}, "offload_layers must be an integer of at least 0, got -1"),
    ],
)
def test_words_that_say_nothing_are_refused(setup: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Setup(**setup)
