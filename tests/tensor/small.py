"""Small models in the styles of well-known families, with their names and shapes; all of a batch's loss in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, HEADS, LENGTH = 13, 16, 4, 6


def batch(samples: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    return {"input_ids": words, "labels": words.roll(-1, 1)}


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.empty(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int, groups: int) -> Tensor:
    """Of (batch, length, heads x size) and groups for key and value."""
    query, key, value = (
        each.unflatten(-1, (number, -1)).transpose(1, 2)
        for each, number in ((query, heads), (key, groups), (value, groups))
    )
    made = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return made.transpose(1, 2).flatten(2)


class PackedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.split_size = HEADS, WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.c_attn(x).split(self.split_size, -1)
        made: Tensor = self.c_proj(attention(query, key, value, self.num_heads, self.num_heads))
        return made


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(WIDTH), PackedAttention()
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(24, WIDTH), "c_proj": Conv1D(WIDTH, 24)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln(x))
        made: Tensor = self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](x)))
        return x + made


class GroupedAttention(nn.Module):
    """With fewer heads for key and value, and a norm per head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = HEADS, 2, 4
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 8, bias=False)
        self.q_norm = nn.LayerNorm(4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).flatten(-2)
        made = attention(query, self.k_proj(x), self.v_proj(x), self.num_heads, self.num_key_value_heads)
        output: Tensor = self.o_proj(made)
        return output


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn = nn.RMSNorm(WIDTH), GroupedAttention()
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(WIDTH, 24, bias=False),
                "up_proj": nn.Linear(WIDTH, 24, bias=False),
                "down_proj": nn.Linear(24, WIDTH, bias=False),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm(x))
        gated: Tensor = functional.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        made: Tensor = self.mlp["down_proj"](gated)
        return x + made


class BertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        own = {name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")}
        heads: Any = nn.ModuleDict(own)
        heads.attention_head_size = WIDTH // HEADS
        self.attention = nn.ModuleDict({"self": heads, "output": nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, 24)})
        self.output = nn.ModuleDict({"dense": nn.Linear(24, WIDTH), "norm": nn.LayerNorm(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self.attention["self"]
        heads = own["query"].weight.shape[0] // own.attention_head_size
        made = attention(own["query"](x), own["key"](x), own["value"](x), heads, heads)
        x = x + self.attention["output"]["dense"](made)  # type: ignore[index]  # a ModuleDict
        return self.output["norm"](x + self.output["dense"](functional.gelu(self.intermediate["dense"](x))))  # type: ignore[no-any-return]  # a Tensor


class LanguageModel(nn.Module):
    """Two blocks between an embedding and a head, which share their weight if `tied`; the vocabulary is a prime."""

    def __init__(self, block: type[nn.Module], *, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.wte(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.lm_head(hidden).flatten(0, 1), labels.flatten())


class Classifier(nn.Module):
    """With three labels, and a head whose last layer has a name of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.ModuleList(BertBlock() for _ in range(2))
        self.classifier = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH), "out_proj": nn.Linear(WIDTH, 3)})

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.word_embeddings(input_ids)
        for block in self.layer:
            hidden = block(hidden)
        logits = self.classifier["out_proj"](self.classifier["dense"](hidden.mean(1)).tanh())
        return functional.cross_entropy(logits, labels[:, 0] % 3)


MODELS = {
    "gpt2": lambda: LanguageModel(GPTBlock, tied=False),
    "gpt2-tied": lambda: LanguageModel(GPTBlock, tied=True),
    "llama": lambda: LanguageModel(LlamaBlock, tied=False),
    "llama-tied": lambda: LanguageModel(LlamaBlock, tied=True),
    "bert-classifier": Classifier,
}


def make(name: str) -> nn.Module:
    """A model in float64 with random weights, the same each time."""
    return fill(MODELS[name]())


def fill(module: nn.Module) -> nn.Module:
    """The module itself in float64 with random weights, the same each time."""
    module.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return module
