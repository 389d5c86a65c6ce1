"""Attentions that pack query, key and value in one layer, each in an order of its own, and other modules with what
rules beyond plain layers are for; in the styles of well-known families, under their names. Written for the tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.tensor import small
from tests.tensor.small import HEADS, WIDTH, LanguageModel

SIZE = WIDTH // HEADS
GROUPS = 2


def _merged(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention of (batch, length, heads, size) each."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.mT / SIZE**0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = (scores if bias is None else scores + bias).masked_fill(~mask, -torch.inf).softmax(-1)
    made: Tensor = (weights @ value).transpose(1, 2).flatten(2)
    return made


class BloomAttention(nn.Module):
    """Query, key and value of a head, then those of the next; a bias per head comes as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, alibi: Tensor) -> Tensor:
        packed = self.query_key_value(x).unflatten(-1, (self.num_heads, 3, SIZE))
        packed /= 1.5  # in place
        query, key, value = packed.unbind(-2)
        bias = alibi.view(x.shape[0], self.num_heads, 1, -1)
        made: Tensor = self.dense(_merged(query, key, value, bias))
        return made


class SelfAttention(nn.Module):
    """That of ChatGLM-2: query, then the fewer heads of key, then those of value."""

    def __init__(self) -> None:
        super().__init__()
        self.multi_query_attention = True
        self.hidden_size_per_attention_head = SIZE
        self.num_attention_heads_per_partition = HEADS
        self.num_multi_query_groups_per_partition = GROUPS
        self.query_key_value = nn.Linear(WIDTH, WIDTH + 2 * GROUPS * SIZE)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads, groups = self.num_attention_heads_per_partition, self.num_multi_query_groups_per_partition
        parts = self.query_key_value(x).split([heads * SIZE, groups * SIZE, groups * SIZE], -1)
        query, key, value = (
            part.unflatten(-1, (number, SIZE)) for part, number in zip(parts, (heads, groups, groups), strict=True)
        )
        made: Tensor = self.dense(_merged(query, key, value))
        return made


class Phi3Attention(nn.Module):
    """It reads the number of heads off a config that all modules share."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.head_dim, self.num_key_value_heads = config, SIZE, GROUPS
        self.qkv_proj = nn.Linear(WIDTH, WIDTH + 2 * GROUPS * SIZE, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.num_key_value_heads * self.head_dim
        parts = self.qkv_proj(x).split([self.config.num_attention_heads * self.head_dim, keys, keys], -1)
        made: Tensor = self.o_proj(_merged(*(part.unflatten(-1, (-1, SIZE)) for part in parts)))
        return made


class Blip2Attention(nn.Module):
    """It divides the width of its input by the number of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        width = hidden_states.shape[-1]
        packed = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, width // self.num_heads))
        made: Tensor = self.projection(_merged(*packed.unbind(-3)))
        return made


class FewAttention(nn.Module):
    """One head of key and value for all of the query, as in Falcon's multi-query attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.multi_query = HEADS, SIZE, True
        self.c_attn, self.c_proj = nn.Linear(WIDTH, WIDTH + 2 * SIZE), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.c_attn(x).unflatten(-1, (-1, SIZE)).split([self.num_heads, 1, 1], -2)
        made: Tensor = self.c_proj(_merged(query, key, value))
        return made


class Experts(nn.Module):
    """All experts in two parameters; each word goes to the expert of its largest score, weighted by that."""

    def __init__(self) -> None:
        super().__init__()
        self.has_bias, self.is_transposed, self.is_concatenated = False, False, True
        self.gate_up_proj = nn.Parameter(torch.empty(3, 2 * 6, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(3, WIDTH, 6))

    def forward(self, hidden: Tensor, chosen: Tensor, *, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("...i,...oi->...o", hidden, self.gate_up_proj[chosen]).chunk(2, -1)
        made = torch.einsum("...i,...oi->...o", functional.silu(gate) * up, self.down_proj[chosen])
        return made * weights[..., None]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), Experts()

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        made: Tensor = self.experts(x, chosen, weights=scores)
        return made


class ActivatedMLP(nn.Module):
    """With an activation that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 24), nn.PReLU(), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc2(self.act(self.fc1(x)))
        return made


class Adapted(nn.Module):
    """A linear layer with a LoRA adapter, whose parts have peft's names."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base_layer(x) + 0.5 * self.lora_B["default"](self.lora_A["default"](x))
        return made


def adapted() -> nn.Module:
    """A model in whose blocks every linear layer has an adapter."""
    module = small.make("llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        for name, layer in list(module.named_modules()):
            if isinstance(layer, nn.Linear) and name.startswith("blocks"):
                module.set_submodule(name, Adapted(layer).double())
    return module


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if not isinstance(self.inner, BloomAttention):
            made: Tensor = x + self.inner(normed)
            return made
        slopes = 0.5 ** torch.arange(1.0, 1 + HEADS, dtype=x.dtype, device=x.device)
        alibi = (slopes[:, None] * torch.arange(x.shape[1], device=x.device)).repeat(x.shape[0], 1)
        added: Tensor = x + self.inner(normed, alibi=alibi[:, None])
        return added


def _phi() -> nn.Module:
    return Phi3Attention(SimpleNamespace(num_attention_heads=HEADS))


INNER = {
    "bloom": BloomAttention,
    "chatglm": SelfAttention,
    "phi": _phi,
    "blip": Blip2Attention,
    "multi-query": FewAttention,
    "experts": Mixture,
    "learned-activation": ActivatedMLP,
}


def make(name: str) -> nn.Module:
    """A language model with two blocks of one kind; in float64 with random weights, the same each time."""
    module = LanguageModel(lambda: Block(INNER[name]()), tied=False).double()  # type: ignore[arg-type]  # makes a block
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return module
