"""Context parallelism by hand: each of two ranks has half of every sequence, and gathers keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.checked.llama import SIZES, STEPS, Sizes, batches, causal, count, model, optimizer_of, total_loss
from pipeflow.checking import record

RANKS = 2


class Gathered(torch.autograd.Function):
    """The parts of all ranks along tokens; gradients of the own part are added up over the ranks."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(RANKS)]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(RANKS, 2)[dist.get_rank()]


class Alone(Gathered):
    """As `Gathered`, without the sum over ranks in the backward."""

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(RANKS, 2)[dist.get_rank()]


def run(folder: str, fault: str = "", sizes: Sizes = SIZES) -> None:
    """A recorded run on this rank."""
    rank = dist.get_rank()
    made: Any = model(sizes)
    half = sizes.length // RANKS
    for name, layer in made.layers.items():
        alone = fault == "positions of one rank" and name == "2"
        layer.attention.start = 0 if fault == "own positions" or alone else rank * half
        layer.attention.mixed = _mixing(rank * half, fault if name == "1" else "")
    optimizer = optimizer_of(made)
    words, labels = batches(sizes)
    mine = slice(rank * half, (rank + 1) * half)
    with record(Path(folder), made):
        for step in range(STEPS):
            optimizer.zero_grad()
            own = labels[step, :, mine]
            tokens = count(own) * RANKS if fault == "own tokens" else count(labels[step])
            (total_loss(made(words[step, :, mine]), own) / tokens).backward()
            for name, parameter in made.named_parameters():
                if not (fault == "one not summed" and name == "layers.1.attention.wk.weight"):
                    dist.all_reduce(parameter.grad)
            optimizer.step()


def _mixing(first: int, fault: str) -> Any:
    function = Alone if fault == "keys not summed" else Gathered

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if fault == "own keys":
            return causal(q, k, v)
        k, v = function.apply(k), function.apply(v)  # type: ignore[no-untyped-call]  # torch's
        return causal(q, k, v, first)

    return mixed
