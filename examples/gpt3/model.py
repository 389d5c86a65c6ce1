"""A GPT, built one pipeline stage at a time.

Layers [start, end) of the model, with the word and position tables when the stage is the first, and the last norm
and the head when it is the last. The initial weights belong to the layer, not to the cut: layer 7 starts the same on
whichever rank, and however many stages there are. Also how it is trained, the loss and the optimizer. What is not
here: pipeflow; a stage is an ordinary module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class Shape:
    """The size of a GPT: `positions` is the longest sequence, `vocabulary` the number of tokens."""

    layers: int
    hidden: int
    heads: int
    positions: int = 1024
    vocabulary: int = 50304


PRESETS = {
    "tiny": Shape(layers=8, hidden=128, heads=4, positions=256, vocabulary=2048),
    "gpt2-small": Shape(layers=12, hidden=768, heads=12),
    "gpt2-medium": Shape(layers=24, hidden=1024, heads=16),
    "gpt2-large": Shape(layers=36, hidden=1280, heads=20),
    "gpt2-xl": Shape(layers=48, hidden=1600, heads=32),
    "gpt3": Shape(layers=96, hidden=12288, heads=96, positions=2048),
}


class Attention(nn.Module):
    """Causal self-attention: every position looks at itself and at what is before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, length, hidden = hidden_states.shape
        mixed = self.query_key_value(hidden_states).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(seen.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """One layer: attention, then a perceptron four times as wide, each behind its norm and beside its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.hidden)
        self.wide = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.output = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.attention(self.norm_1(hidden_states))
        return hidden_states + self.output(functional.gelu(self.wide(self.norm_2(hidden_states))))


class Stage(nn.Module):
    """Layers [start, end) and what belongs to the ends of the model.

    Blocks keep the index they have in the whole model, so parameters have the same name under every cut.
    """

    def __init__(self, shape: Shape, start: int, end: int) -> None:
        super().__init__()
        first, last = start == 0, end == shape.layers
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.hidden) if first else None
        self.position_embeddings = nn.Embedding(shape.positions, shape.hidden) if first else None
        self.blocks = nn.ModuleDict({str(layer): Block(shape) for layer in range(start, end)})
        self.norm = nn.LayerNorm(shape.hidden) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if last else None

    def forward(self, hidden_states: Tensor | None = None, input_ids: Tensor | None = None) -> Tensor:
        """The first stage takes token ids, (batch, length); every other the output of the one before it,
        (batch, length, hidden). The last makes logits, (batch, length, vocabulary).
        """
        if self.word_embeddings is not None and self.position_embeddings is not None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            hidden_states = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        for block in self.blocks.values():
            hidden_states = block(hidden_states)
        return hidden_states if self.head is None else self.head(self.norm(hidden_states))


def build_stage(shape: Shape, start: int, end: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Stage:
    """The stage with layers [start, end), nothing else allocated.

    A stage that is first and last ties its two word tables; two stages are tied by whoever knows where both live.
    """
    stage = Stage(shape, start, end)
    for layer, block in stage.blocks.items():
        _initialize(block, seed, int(layer), shape)
    for number, table in enumerate((stage.word_embeddings or stage.head, stage.position_embeddings), shape.layers):
        if table is not None:
            _initialize(table, seed, number, shape)
    if stage.word_embeddings is not None and stage.head is not None:
        stage.head.weight = stage.word_embeddings.weight
    return stage.to(dtype)


@torch.no_grad()
def _initialize(part: nn.Module, seed: int, number: int, shape: Shape) -> None:
    """GPT-2's initial weights, drawn from `seed` and the part's `number` in the whole model, and nothing else."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + number)
    for name, parameter in part.named_parameters():
        if name.endswith("output.weight"):  # they add to the residual stream, twice a layer
            parameter.normal_(0, 0.02 / (2 * shape.layers) ** 0.5, generator=generator)
        elif name.endswith("weight") and parameter.dim() == 2:
            parameter.normal_(0, 0.02, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()


def next_token_loss(logits: Tensor, input_ids: Tensor) -> Tensor:
    """The mean cross-entropy of each token given those before it: logits (batch, length, vocabulary) against the
    very ids (batch, length) that went in, shifted by one.
    """
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def make_optimizer(
    parameters: Iterable[nn.Parameter], rate: float, steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Adam, and its learning rate: up to `rate` over the first twentieth of the steps, then a cosine to a tenth."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    rise = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise))

    return optimizer, LambdaLR(optimizer, factor)
