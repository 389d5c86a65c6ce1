"""A Llama of two layers, dense or with experts, its batches, and the plain job: for the second set of faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn

from pipeflow.checking import record

STEPS, RATE, AUXILIARY = 2, 1e-3, 0.1


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama and its batch; `experts` of each layer, 0 for a dense one."""

    words: int = 48
    width: int = 24
    heads: int = 4
    shared: int = 2
    length: int = 8
    batch: int = 8
    layers: int = 4
    experts: int = 0
    eps: float = 1e-5
    dtype: torch.dtype = torch.float32


SIZES = Sizes()


def rotated(values: Tensor, start: int) -> Tensor:
    """Rotary positions from `start` on, for [batch, heads, tokens, width]."""
    half = values.shape[-1] // 2
    angles = torch.arange(start, start + values.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    one, two = values[..., :half], values[..., half:]
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Attention(nn.Module):
    """Grouped queries; `mixed` may be replaced by what has the keys of other ranks."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.each, self.start = sizes.width // sizes.heads, 0
        self.wq, self.wo = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(sizes.width, sizes.shared * self.each, bias=False) for _ in range(2))
        self.mixed: Callable[[Tensor, Tensor, Tensor], Tensor] = causal

    def forward(self, values: Tensor) -> Tensor:
        q, k, v = (w(values).unflatten(-1, (-1, self.each)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = self.mixed(rotated(q, self.start), rotated(k, self.start), v)
        found: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return found


def causal(q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> Tensor:
    """Attention of queries that begin at token `first` of the keys."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(first)
    return F.scaled_dot_product_attention(q, k, v, mask)


class Feed(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.width, 2 * sizes.width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * sizes.width, sizes.width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.w2(F.silu(self.w1(values)) * self.w3(values))
        return found


class Experts(nn.Module):
    """Each token goes to one expert; `auxiliary` is the last call's loss of balance. Experts may be None."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = nn.ModuleDict({str(index): Feed(sizes) for index in range(sizes.experts)})
        self.auxiliary = torch.zeros(())

    def routed(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen expert of each token, and its weight."""
        shares = self.router(values).softmax(-1)
        weight, chosen = shares.max(-1)
        counts = F.one_hot(chosen, shares.shape[-1]).float().sum((0, 1))
        self.auxiliary = (shares.sum((0, 1)) * counts).sum()
        return chosen, weight

    def forward(self, values: Tensor) -> Tensor:
        chosen, weight = self.routed(values)
        return sum_of_experts(self.experts, values, chosen) * weight[..., None]


def sum_of_experts(experts: nn.ModuleDict, values: Tensor, chosen: Tensor) -> Tensor:
    """The outputs of these experts for the tokens that chose them, zero for others."""
    found = torch.zeros_like(values)
    for index, expert in experts.items():
        found = found + expert(values) * (chosen == int(index))[..., None]
    return found


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(sizes.width, sizes.eps) for _ in range(2))
        self.attention = Attention(sizes)
        self.feed = Experts(sizes) if sizes.experts else Feed(sizes)

    def forward(self, values: Tensor) -> Tensor:
        values = values + self.attention(self.norm1(values))
        found: Tensor = values + self.feed(self.norm2(values))
        return found


class Llama(nn.Module):
    """A Llama; parts of it may be None, for stages."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(sizes.words, sizes.width)
        self.layers: Any = nn.ModuleDict({str(index): Layer(sizes) for index in range(sizes.layers)})
        self.norm: Any = nn.RMSNorm(sizes.width, sizes.eps)
        self.head: Any = nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        values = values if self.embed is None else self.embed(values)
        for layer in self.layers.values():
            values = layer(values)
        return values if self.head is None else self.head(self.norm(values))


def model(sizes: Sizes = SIZES, seed: int = 5) -> Llama:
    """The same initial weights for every job."""
    torch.manual_seed(seed)
    made = Llama(sizes)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return made.to(sizes.dtype)


def batches(sizes: Sizes = SIZES) -> tuple[Tensor, Tensor]:
    """Words and labels of all steps; the later half of tokens has fewer labels."""
    words = torch.randint(
        sizes.words, (STEPS, sizes.batch, sizes.length + 1), generator=torch.Generator().manual_seed(9)
    )
    labels = words[..., 1:].clone()
    for sample in range(sizes.batch):
        labels[:, sample, sizes.length - 1 - sample // 2 :] = -100
    return words[..., :-1], labels


def total_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def count(labels: Tensor) -> Tensor:
    """How many labels count."""
    return (labels != -100).sum()


def auxiliary(made: Llama, tokens: int) -> Tensor:
    """The loss of balance of all layers: 0 for dense ones."""
    found = [layer.feed.auxiliary for layer in made.layers.values() if isinstance(layer.feed, Experts)]
    return AUXILIARY * sum(found, torch.zeros(())) / tokens**2


def optimizer_of(made: nn.Module, decay: float = 0.1, on_norms: bool = False) -> torch.optim.Optimizer:
    """AdamW whose weight decay leaves out norms, unless `on_norms`."""
    norms = [each for each in made.parameters() if each.dim() == 1]
    others = [each for each in made.parameters() if each.dim() > 1]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": norms, "weight_decay": decay if on_norms else 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], RATE, weight_decay=decay)


def plain(folder: Path, sizes: Sizes = SIZES, clip: float | None = None, warm: bool = False) -> Path:
    """The reference: whole batches in one process, with clipping and a rate that doubles if asked."""
    made = model(sizes)
    optimizer = optimizer_of(made)
    words, labels = batches(sizes)
    with record(folder, made):
        for step in range(STEPS):
            if warm:
                optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = RATE * (step + 1)
            optimizer.zero_grad()
            loss = total_loss(made(words[step]), labels[step]) / count(labels[step])
            (loss + auxiliary(made, labels[step].numel())).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(made.parameters(), clip)
            optimizer.step()
    return folder
