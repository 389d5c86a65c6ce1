"""A model of words whose loss is any of the forms, its batches, and what one process computes for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.losses.forms import CLASSES, IGNORED, LENGTH, Loss


class Words(nn.Module):
    """Predicts words; computes the loss itself if it gets targets, which are not called labels."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.head = nn.Linear(8, CLASSES, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
        self.loss = loss

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        hidden = self.embedding(idx)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        scores = self.head(hidden)
        return scores if targets is None else (scores, self.loss(scores, targets))


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    """Sentences of which fewer and fewer words count."""
    words = torch.randint(CLASSES, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    targets = words.roll(1, 1)
    lengths = torch.tensor([LENGTH - sample % LENGTH for sample in range(samples)])
    return words, torch.where(torch.arange(LENGTH) < lengths[:, None], targets, IGNORED)
