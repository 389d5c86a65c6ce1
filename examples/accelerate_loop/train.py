"""Trains a small transformer in accelerate's usual loop, through a pipeline.

    torchrun --nproc-per-node 2 examples/accelerate_loop/train.py
    torchrun --nproc-per-node 4 examples/accelerate_loop/train.py --tensor 2
    python examples/accelerate_loop/train.py --library accelerate

The last line runs the same loop on accelerate itself, in one process.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, WIDTH, LENGTH, SAMPLES, BATCH = 50, 32, 16, 64, 16


class Model(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """The logits of the next words."""
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def accelerator_of(arguments: argparse.Namespace) -> Any:
    """The Accelerator, which is all that differs."""
    library = import_module(arguments.library)
    if arguments.library == "accelerate":
        return library.Accelerator(cpu=True)
    sizes = {"tensor": arguments.tensor, "schedule": arguments.schedule, "microbatches": 4}
    return library.Accelerator(pipeline=2, cpu=True, **sizes)


def main() -> None:
    """Trains a few epochs, in which each word predicts the one that follows it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--library", default="pipeflow.accelerate")
    arguments = parser.parse_args()
    accelerator = accelerator_of(arguments)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    words = torch.arange(SAMPLES * (LENGTH + 1)).remainder(WORDS).view(SAMPLES, LENGTH + 1)
    loader = DataLoader(TensorDataset(words), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(arguments.epochs):
        for (batch,) in loader:
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
