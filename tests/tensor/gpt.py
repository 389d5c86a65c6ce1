"""A tiny GPT, of stock layers or of their parts on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeflow.engine.parallel.transport.protocol import Group
from pipeflow.tensor import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    VocabParallelClassifier,
    VocabParallelEmbedding,
)

VOCABULARY, WIDTH, HEADS = 13, 16, 4


class Block(nn.Module):
    """Pre-norm; queries, keys and values lie together per head, so that a part of the columns is whole heads."""

    attention_norm: Any  # a stock layer, or a rank's part of one
    query_key_value: Any
    project: Any
    perceptron_norm: Any
    up: Any
    down: Any

    def __init__(self, attention: tuple[nn.Module, ...], perceptron: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.attention_norm, self.query_key_value, self.project = attention
        self.perceptron_norm, self.up, self.down = perceptron

    def forward(self, hidden: Tensor) -> Tensor:
        joint = self.query_key_value(self.attention_norm(hidden))
        query, key, value = joint.unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).flatten(2))
        widened: Tensor = self.down(functional.gelu(self.up(self.perceptron_norm(hidden))))
        return hidden + widened


class Model(nn.Module):
    words: Any
    norm: Any
    head: Any

    def __init__(self, words: nn.Module, block: Block, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.words, self.block, self.norm, self.head = words, block, norm, head

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.block(self.words(tokens))))
        return logits


def stock_block() -> Block:
    return Block(
        (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)),
        (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)),
    )


def stock() -> Model:
    """Its head is tied to its embedding. In float64, with norms that matter."""
    words, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = words.weight
    model = Model(words, stock_block(), nn.LayerNorm(WIDTH), head).double()
    for norm in model.modules():
        if isinstance(norm, nn.LayerNorm):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return model


def parallel_block(native: Block, *, sequence: bool, group: Group | None = None) -> Block:
    options: dict[str, Any] = {"group": group, "sequence_parallel": sequence}
    return Block(
        (
            LayerNorm.from_native_module(native.attention_norm, **options),
            ColumnParallelLinear.from_native_module(native.query_key_value, **options),
            RowParallelLinear.from_native_module(native.project, **options),
        ),
        (
            LayerNorm.from_native_module(native.perceptron_norm, **options),
            ColumnParallelLinear.from_native_module(native.up, **options),
            RowParallelLinear.from_native_module(native.down, **options),
        ),
    )


def parallel(native: Model, *, sequence: bool) -> Model:
    words = VocabParallelEmbedding.from_native_module(native.words, sequence_parallel=sequence)
    options: dict[str, Any] = {"weight": words.weight, "sequence_parallel": sequence}
    head = VocabParallelClassifier.from_native_module(native.head, **options)
    norm = LayerNorm.from_native_module(native.norm, sequence_parallel=sequence)
    return Model(words, parallel_block(native.block, sequence=sequence), norm, head)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens (2, 8) and labels, of which one is ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCABULARY, (2, 2, 8), generator=generator)
    labels[0, 0] = -100
    return tokens, labels
