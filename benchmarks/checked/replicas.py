"""A loop with two replicas, whose gradients it adds up itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.checked.gpt import RATE, SIZES, STEPS, Sizes, batches, mean_loss, model, tokens_of
from pipeflow.checking import record

RANKS = 2


def run(folder: str, fault: str = "", sizes: Sizes = SIZES) -> None:
    """A recorded run on this rank. Each replica has half of the batch, in two microbatches."""
    rank = dist.get_rank()
    made = model(sizes)
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    words, labels = batches(sizes)
    if fault == "recompute":
        _recompute(made, rank)
    with record(Path(folder), made):
        for step in range(STEPS):
            mine = slice(rank * sizes.batch // RANKS, (rank + 1) * sizes.batch // RANKS)
            if fault == "same samples":
                mine = slice(0, sizes.batch // RANKS)
            optimizer.zero_grad()
            _backwards(made, words[step, mine], labels[step, mine], tokens_of(labels[step]), fault)
            _add_up(made, fault)
            optimizer.step()


def _backwards(made: Any, words: Tensor, labels: Tensor, tokens: Tensor, fault: str) -> None:
    for given, wanted in zip(words.chunk(2), labels.chunk(2), strict=True):
        total = tokens_of(wanted) * 4 if fault == "local tokens" else tokens  # the mean of means
        scale = 2.0 if fault == "scale" else 1.0
        (scale * mean_loss(made(given), wanted, total)).backward()


def _add_up(made: Any, fault: str) -> None:
    for name, parameter in made.named_parameters():
        if not (fault == "one parameter" and name == "blocks.1.up.bias") and fault != "no sum":
            dist.all_reduce(parameter.grad)
        if fault == "no average" and "blocks.2" in name:
            parameter.grad *= RANKS


def _recompute(made: Any, rank: int) -> None:
    """Block 2 is computed again in the backward, from inputs of the other replica."""
    block = made.blocks["2"]
    inner, calls = block.forward, [0]

    def forward(values: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] % 2 == 0:  # in the backward
            other = values.detach().clone()
            dist.all_reduce(other)
            values = values + (other - 2 * values.detach())
        found: Tensor = inner(values)
        return found

    block.forward = lambda values: checkpoint(forward, values, use_reentrant=False)
