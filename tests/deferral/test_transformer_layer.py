"""A layer as planning describes it: what it keeps and defers is what the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeflow import GPT, PRECISIONS, Placement, Setup
from pipeflow.engine.deferral.module import defer_weight_gradients
from pipeflow.engine.deferral.products import Queue
from pipeflow.planning.physical import stage_costs
from tests.deferral.halves import held_by, products_of

MODEL = GPT(layers=8, hidden=64, heads=4, positions=32, vocabulary=101)


class Block(nn.Module):
    """A layer as `transformer` describes it."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        hidden, self.heads = model.hidden, model.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query_key_value, self.attention = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.output = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        mixed = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = mixed
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention(seen.transpose(1, 2).reshape(batch, length, hidden))
        output: torch.Tensor = self.output(functional.gelu(self.wide(self.norm_2(x))))
        return x + output


def sizes(tensors: list[torch.Tensor], but: nn.Module) -> int:
    """Bytes of the memory behind the tensors, each piece once, without parameters."""
    pieces = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    own = {parameter.untyped_storage().data_ptr() for parameter in but.parameters()}
    return sum(size for pointer, size in pieces.items() if pointer not in own)


def run(block: nn.Module) -> tuple[int, int]:
    """Bytes that a forward saves for the backward, and bytes that the backward defers."""
    deferral = defer_weight_gradients(block)
    queue: Queue = {}
    saved: list[torch.Tensor] = []
    deferral.queue = queue

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = block(torch.randn(2, 32, 64, requires_grad=True))
    kept = sizes(saved, block)
    output.backward(torch.randn_like(output))
    return kept, sizes([tensor for product in products_of(queue) for tensor in held_by(product)], block)


def test_a_real_layer_has_keeps_and_defers_that_much() -> None:
    """Without dropout, so without its two masks; what a norm and attention keep per token or head is left out."""
    block, token = Block(MODEL), 2 * 32 * 64
    saved, held = run(block)
    setup = Setup(microbatch_size=2, precision=PRECISIONS["float32"])
    costs = stage_costs(MODEL, Placement.linear(8), setup)
    assert sum(map(torch.numel, block.parameters())) == MODEL.parameters_of([(1, 2)])
    assert saved == pytest.approx(costs.saved_bytes[1] - 2 * token, rel=0.01)
    assert held == costs.deferred_bytes[1] == 4 * 16 * token


class GatedBlock(nn.Module):
    """A layer of a LLaMA, with fewer heads of key and value than of query. Its norms are fused, unlike nn.RMSNorm on a
    CPU.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.size, hidden, wide = model.head_width, model.hidden, model.wide
        self.norm_1, self.norm_2 = (nn.LayerNorm(hidden, bias=False) for _ in range(2))
        self.query, self.attention = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(hidden, model.key_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.output = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        query, key, value = (
            linear(normed).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.attention(seen.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        output: torch.Tensor = self.output(functional.silu(self.gate(normed)) * self.up(normed))
        return x + output


def test_a_real_gated_layer_with_grouped_heads_has_keeps_and_defers_that_much() -> None:
    """But for the activation of the gate, which is not fused here; without dropout there are no masks."""
    model = replace(GPT.named("llama3-8b"), layers=8, hidden=64, heads=4, kv_heads=2, ffn=96, positions=32)
    block, token = GatedBlock(model), 2 * 32
    saved, held = run(block)
    setup = Setup(microbatch_size=2, precision=PRECISIONS["float32"])
    costs = stage_costs(model, Placement.linear(8), setup)
    assert sum(map(torch.numel, block.parameters())) == model.parameters_of([(1, 2)])
    assert saved == pytest.approx(costs.saved_bytes[1] + 4 * token * model.wide, rel=0.02)
    assert held == costs.deferred_bytes[1]
