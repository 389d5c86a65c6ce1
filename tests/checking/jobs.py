"""A small GPT, and a plain job that trains it: the reference of these tests."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn

from pipeflow.checking import plant, record

WORDS, WIDTH, LENGTH, BATCH = 40, 16, 10, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = inputs + self.down(self.act(self.up(self.ln(inputs))))
        return found


class GPT(nn.Module):
    def __init__(self, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        values = self.embed(words)
        for block in self.blocks:
            values = block(values)
        found: Tensor = self.head(self.norm(values))
        return found


def batches(steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Words and labels; those of later samples are shorter."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (steps, BATCH, LENGTH + 1), generator=generator)
    labels = words[..., 1:].clone()
    labels[:, BATCH // 2 :, LENGTH // 2 :] = -100
    return words[..., :-1], labels


def train(
    folder: Path,
    *,
    microbatches: int = 1,
    steps: int = 2,
    fault: tuple[str, dict[str, Any]] | None = None,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    clip: float | None = None,
    seed: int = 0,
    whole: str = "",
) -> Path:
    """A recorded job, with a fault from `plant`."""
    torch.manual_seed(seed)
    model = GPT(tied=tied).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    words, labels = batches(steps)
    with ExitStack() as stack:
        if fault is not None:
            stack.enter_context(plant(fault[0], model, **fault[1]))
        stack.enter_context(record(folder, model, whole=whole))
        for step in range(steps):
            optimizer.zero_grad()
            total = (labels[step] != -100).sum()
            for given, wanted in zip(words[step].chunk(microbatches), labels[step].chunk(microbatches), strict=True):
                logits = model(given).flatten(0, 1).float()
                (F.cross_entropy(logits, wanted.flatten(), reduction="sum") / total).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return folder
