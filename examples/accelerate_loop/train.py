"""Trains a small transformer in accelerate's usual loop, through a pipeline, with evaluation; and goes on from the last
state in a folder.

    torchrun --nproc-per-node 2 examples/accelerate_loop/train.py
    torchrun --nproc-per-node 2 examples/accelerate_loop/train.py --folder run
    torchrun --nproc-per-node 2 examples/accelerate_loop/train.py --schedule zb-v
    python examples/accelerate_loop/train.py --library accelerate

The last line runs the same loop on accelerate itself, in one process. Run the second line again with more --epochs: it
goes on, also under another schedule.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, WIDTH, LENGTH, SAMPLES, HELD_OUT, BATCH = 50, 32, 16, 64, 16, 16


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
    return library.Accelerator(pipeline=2, cpu=True, schedule=arguments.schedule, microbatches=4)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """Each word predicts the one that follows it."""
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


@torch.no_grad()
def evaluate(accelerator: Any, model: nn.Module, loader: DataLoader[Any]) -> float:
    """The mean loss over the held-out batches of all replicas."""
    model.eval()
    losses = [loss_of(model, batch) for (batch,) in loader]
    model.train()
    return float(accelerator.gather(torch.stack(losses)).mean())


def main() -> None:
    """Trains some epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="save every epoch there, and go on from the newest")
    parser.add_argument("--library", default="pipeflow.accelerate")
    arguments = parser.parse_args()
    accelerator = accelerator_of(arguments)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    words = torch.arange((SAMPLES + HELD_OUT) * (LENGTH + 1)).remainder(WORDS).view(-1, LENGTH + 1)
    loader = DataLoader(TensorDataset(words[:SAMPLES]), batch_size=BATCH, shuffle=True)
    held_out = DataLoader(TensorDataset(words[SAMPLES:]), batch_size=BATCH)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    saved = sorted(arguments.folder.glob("epoch-*"), key=epochs_of) if arguments.folder else []
    if saved:
        accelerator.load_state(saved[-1])
    for epoch in range(epochs_of(saved[-1]) if saved else 0, arguments.epochs):
        for (batch,) in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        evaluated = evaluate(accelerator, model, held_out)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, held out {evaluated:.4f}")
        if arguments.folder:
            unfinished = arguments.folder / "unfinished"  # until all of it is saved
            accelerator.save_state(unfinished)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                unfinished.rename(arguments.folder / f"epoch-{epoch + 1}")


def epochs_of(state: Path) -> int:
    """How many epochs came before a saved state."""
    return int(state.name.removeprefix("epoch-"))


if __name__ == "__main__":
    main()
