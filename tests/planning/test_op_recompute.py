"""Checkpoint "op": the bytes that a block of torch saves under torchtitan's policy, and the times of what it makes
again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeflow import GPT, Placement, Setup, UsageError, make_schedule, plan
from pipeflow.planning.cluster import Cluster
from pipeflow.planning.kept import layer_kept, recomputed_bytes
from pipeflow.planning.libraries.megatron import LIBRARY as MEGATRON
from pipeflow.planning.libraries.torchtitan import LIBRARY as TORCHTITAN
from pipeflow.planning.mesh import Mesh
from pipeflow.planning.physical import physical_costs, rates_of, stage_costs
from pipeflow.planning.work import MatrixProduct

PLAIN: dict[str, Any] = {"gated": True, "biases": "none", "norm": "rms", "dropout": False, "tied": False}
LLAMA = GPT(2, 256, 8, 64, 512, kv_heads=2, ffn=704, position_table=False, **PLAIN)
H100 = Cluster.of("h100-80gb")
SAVED = (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)


class Block(nn.Module):
    """A layer of the model, whose linears are in torchtitan's order."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.head = model.head_width
        self.norms = nn.ModuleList(nn.RMSNorm(model.hidden) for _ in range(2))
        widths = (model.query_width, model.key_width, model.key_width)
        self.made = nn.ModuleList(nn.Linear(model.hidden, width, bias=False) for width in widths)
        self.output = nn.Linear(model.query_width, model.hidden, bias=False)
        wide = range(2 if model.gated else 1)
        self.wide = nn.ModuleList(nn.Linear(model.hidden, model.wide, bias=False) for _ in wide)
        self.down = nn.Linear(model.wide, model.hidden, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        normed = self.norms[0](given)
        made = [linear(normed).unflatten(-1, (-1, self.head)).transpose(1, 2) for linear in self.made]
        key, value = (each.repeat_interleave(made[0].shape[1] // each.shape[1], 1) for each in made[1:])
        attended = scaled_dot_product_attention(made[0], key, value, is_causal=True)
        hidden: Tensor = given + self.output(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](hidden)
        wide = silu(self.wide[0](normed))
        hidden += self.down(wide * self.wide[1](normed) if len(self.wide) > 1 else wide)
        return hidden


def policy() -> Any:
    """Every other product and attention are saved."""
    seen: Counter[bool] = Counter()

    def chosen(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = function == SAVED[0]
        seen[context.is_recompute] += is_product
        is_saved = function in SAVED and not (is_product and seen[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(chosen)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("changed", [{}, {"gated": False, "ffn": 1024}, {"kv_heads": 8}])
def test_a_layer_keeps_what_torch_saves_under_the_policy(changed: dict[str, Any]) -> None:
    """Compiled, so that the last product, which no backward needs, is not kept."""
    model = replace(LLAMA, **changed)
    torch.manual_seed(0)
    block = Block(model).to(torch.bfloat16)
    own = {each.untyped_storage().data_ptr() for each in block.parameters()}
    saved: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        is_extra = value.dtype != torch.bfloat16  # random states and the logarithms of sums, which plans leave out
        if storage.data_ptr() not in own and not is_extra:
            saved[storage.data_ptr()] = storage.nbytes()
        return value

    given = torch.randn(2, model.tokens, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    run = torch.compile(
        lambda value: checkpoint(block, value, use_reentrant=False, context_fn=policy),
        fullgraph=True,
        backend="aot_eager_decomp_partition",
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        run(given)
    assert sum(saved.values()) == 2 * model.tokens * layer_kept(model, Setup(checkpoint="op"))


@pytest.mark.parametrize("changed", [{}, {"gated": False, "ffn": 1024}])
def test_a_layer_that_is_not_compiled_keeps_the_last_product_too(changed: dict[str, Any]) -> None:
    """What torch stores beside the layer's input. Without a gate, the last product is not one of every other."""
    model = replace(LLAMA, **changed)
    block, stored = Block(model).to(torch.bfloat16), policy()
    given = torch.randn(2, model.tokens, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    checkpoint(block, given, use_reentrant=False, context_fn=lambda: stored)
    found = [getattr(each, "val", None) for each in tree_leaves([*map(dict, stored[0].storage.values())])]
    kept = sum(each.nbytes for each in found if isinstance(each, Tensor) and each.dtype == torch.bfloat16)
    assert given.nbytes + kept == 2 * model.tokens * layer_kept(model, Setup(checkpoint="op", eager=True))


def test_tensor_ranks_keep_their_part_and_the_sum_of_attention() -> None:
    setup = Setup(tensor=2, sequence_parallel=True, checkpoint="op")
    query, value, attended, wide = 256 // 2, 64 // 2, 256 // 2, 704 // 2
    assert layer_kept(LLAMA, setup) == 2 * (2 * 256 // 2 + query + value + attended + wide)
    without = replace(setup, sequence_parallel=False)
    assert layer_kept(LLAMA, without) == 2 * (256 + query + value + attended + wide)
    eager = replace(setup, eager=True)  # the last product is whole before its parts are summed, and then a part
    assert layer_kept(LLAMA, eager) - layer_kept(LLAMA, setup) == 2 * (256 + 256 // 2)


def test_a_backward_makes_the_rest_of_a_layer_again() -> None:
    kept, everything = layer_kept(LLAMA, Setup(checkpoint="op")), layer_kept(LLAMA, Setup())
    assert recomputed_bytes(LLAMA, Setup(checkpoint="op")) == LLAMA.tokens * (everything - kept)


def test_a_backward_takes_longer_by_every_other_product() -> None:
    """Key, output and up, and two norms, positions and the activation function."""
    model = replace(LLAMA, layers=1, hidden=4096, heads=32, kv_heads=8, ffn=14336, positions=4096)
    mesh, placement = Mesh.of(Setup(), 1, 8), Placement.linear(1)
    plain, again = (
        physical_costs(model, placement, each, H100, mesh=mesh).cost.backward_input[0]
        for each in (Setup(), Setup(checkpoint="op"))
    )
    rates = rates_of(H100, Setup())
    products = (MatrixProduct(4096, 1024, 4096), MatrixProduct(4096, 4096, 4096), MatrixProduct(4096, 14336, 4096))
    moved = 2 * 4096 * (2 * 2 * 4096 + 2 * (4096 + 1024) + 3 * 14336)
    assert again - plain == pytest.approx(sum(map(rates.product, products)) + rates.moving(moved))


def test_without_a_device_the_operations_of_every_other_product_count() -> None:
    def backward(checkpoint: Any) -> float:
        return stage_costs(LLAMA, Placement.linear(1), Setup(checkpoint=checkpoint), flops=1.0).backward_input[0]

    assert backward("op") - backward("none") == 2 * 64 * 2 * 256 * (64 + 256 + 704)


def test_torchtitan_gets_its_option_and_megatron_has_none() -> None:
    setup = Setup(data=2, zero=1, checkpoint="op")
    found = plan(LLAMA, make_schedule("1f1b", ranks=1, microbatches=1), setup, cluster=H100)
    assert 'mode = "selective"\nselective_ac_option = "op"' in TORCHTITAN.options(found).text
    with pytest.raises(UsageError, match="recomputes modules, not single products"):
        MEGATRON.options(found)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"experts": 8, "experts_per_token": 2}, {}, "for layers with one MLP and without latent attention"),
        ({}, {"keep_scores": True}, "keeps the output of fused attention"),
        ({}, {"recompute_modules": ("mlp",)}, "checkpoint 'op' recomputes all modules"),
    ],
)
def test_what_has_other_products_is_refused(changed: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layer_kept(replace(LLAMA, **changed), Setup(checkpoint="op", **options))
