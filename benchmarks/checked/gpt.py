"""The GPT that all jobs train, its batches, and the plain job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn

from pipeflow.checking import record

STEPS, RATE = 2, 1e-3


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT and its batch."""

    words: int = 32
    width: int = 16
    heads: int = 2
    length: int = 8
    batch: int = 8
    layers: int = 4
    tied: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 1


SIZES = Sizes()


class Attention(nn.Module):
    """Causal attention over the heads that the projections have, all or a rank's share."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.q, self.k, self.v, self.o = (nn.Linear(sizes.width, sizes.width) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        q, k, v = (
            each(values).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(sizes)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = nn.GELU()

    def forward(self, values: Tensor) -> Tensor:
        values = values + self.attention(self.ln1(values))
        found: Tensor = values + self.down(self.act(self.up(self.ln2(values))))
        return found


class GPT(nn.Module):
    """A GPT; parts of it may be None, for stages. The head may have the weight of the embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(sizes.words, sizes.width)
        self.blocks = nn.ModuleDict({str(index): Block(sizes) for index in range(sizes.layers)})
        self.norm: nn.Module | None = nn.LayerNorm(sizes.width)
        self.head: nn.Module | None = nn.Linear(sizes.width, sizes.words, bias=False)
        if sizes.tied:
            self.head.weight = self.embed.weight

    def forward(self, values: Tensor) -> Tensor:
        values = values if self.embed is None else self.embed(values)
        for block in self.blocks.values():
            values = block(values)
        return values if self.norm is None or self.head is None else self.head(self.norm(values))


def model(sizes: Sizes = SIZES) -> GPT:
    """The same initial weights for every job, without those that are zero or one."""
    torch.manual_seed(sizes.seed)
    made = GPT(sizes)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return made.to(sizes.dtype)


def batches(sizes: Sizes = SIZES) -> tuple[Tensor, Tensor]:
    """Words and labels of all steps; samples have different numbers of labels."""
    generator = torch.Generator().manual_seed(sizes.seed + 1)
    words = torch.randint(sizes.words, (STEPS, sizes.batch, sizes.length + 1), generator=generator)
    labels = words[..., 1:].clone()
    for sample in range(sizes.batch):
        labels[:, sample, sizes.length - sample * sizes.length // (2 * sizes.batch) :] = -100
    return words[..., :-1], labels


def mean_loss(logits: Tensor, labels: Tensor, tokens: Tensor | float, smoothing: float = 0.0) -> Tensor:
    """The part of the batch's mean loss, over so many tokens, that these labels have."""
    rows = logits.flatten(0, 1).float()
    return F.cross_entropy(rows, labels.flatten(), reduction="sum", label_smoothing=smoothing) / tokens


def tokens_of(labels: Tensor) -> Tensor:
    """How many labels count."""
    return (labels != -100).sum()


def plain(folder: Path, sizes: Sizes = SIZES, *, clip: float | None = None, smoothing: float = 0.0) -> Path:
    """The reference: whole batches in one process."""
    made = model(sizes)
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    words, labels = batches(sizes)
    with record(folder, made, samples=True):
        for step in range(STEPS):
            optimizer.zero_grad()
            mean_loss(made(words[step]), labels[step], tokens_of(labels[step]), smoothing).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(made.parameters(), clip)
            optimizer.step()
    return folder
