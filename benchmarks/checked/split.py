"""Tensor parallelism written by hand on two ranks, as Megatron-LM has it: layers that are split along outputs, along
inputs and along the vocabulary, and a cross entropy over parts of the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn

from benchmarks.checked.gpt import RATE, SIZES, STEPS, Sizes, batches, model, tokens_of
from pipeflow.checking import record

RANKS = 2
ALONG = {"q": 0, "k": 0, "v": 0, "up": 0, "o": 1, "down": 1, "embed": 0, "head": 0}


class Copied(torch.autograd.Function):
    """The input; gradients are added up over the ranks."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """The sum over the ranks; gradients pass."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def copied(values: Tensor) -> Tensor:
    found: Tensor = Copied.apply(values)  # type: ignore[no-untyped-call]  # torch's
    return found


def summed(values: Tensor) -> Tensor:
    found: Tensor = Summed.apply(values)  # type: ignore[no-untyped-call]  # torch's
    return found


class Column(nn.Linear):
    """Split along its outputs."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(copied(input))


class Row(nn.Linear):
    """Split along its inputs."""

    fault = ""

    def forward(self, input: Tensor) -> Tensor:
        found = F.linear(input, self.weight, self.bias if self.fault == "bias twice" else None)
        found = found if self.fault == "no sum" else summed(found)
        return found if self.fault == "bias twice" else found + self.bias


class Words(nn.Embedding):
    """Split along the vocabulary."""

    fault = ""

    def forward(self, input: Tensor) -> Tensor:
        mine = self.num_embeddings
        first = dist.get_rank() * mine
        there = (input >= first) & (input < first + mine)
        found = super().forward((input - first).clamp(0, mine - 1))
        if self.fault != "no mask":
            found = found * there[..., None]
        return summed(found)


class Scattered(nn.Module):
    """A norm whose output is scattered along the sequence and gathered again."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, values: Tensor) -> Tensor:
        values = F.layer_norm(values, values.shape[-1:], self.weight, self.bias, self.eps)
        return torch.cat([*reversed(values.chunk(RANKS, 1))], 1)


def loss(logits: Tensor, labels: Tensor, tokens: Tensor, smoothing: float, fault: str) -> Tensor:
    """The mean cross entropy of the parts of the logits that the ranks have."""
    rank, part = dist.get_rank(), logits.shape[-1]
    if fault == "gathered logits":
        parts = [torch.empty_like(logits) for _ in range(RANKS)]
        dist.all_gather(parts, logits.detach())
        logits = torch.cat([logits if index == rank else each for index, each in enumerate(parts)], -1)
    most = logits.detach().amax(-1)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    logits = logits - most[..., None]
    total = summed(logits.exp().sum(-1)).log()
    first = 0 if fault == "gathered logits" else rank * part
    there = (labels >= first) & (labels < first + logits.shape[-1])
    own = logits.gather(-1, (labels - first).clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * there
    own = own / RANKS if fault == "gathered logits" else own
    losses = total - summed(own)
    if smoothing:
        mean = logits.mean(-1)
        mean = mean if fault == "local vocabulary" else summed(mean) / RANKS
        losses = (1 - smoothing) * losses + smoothing * (total - mean)
    found: Tensor = (losses * (labels != -100)).sum() / tokens
    return found


def _part(linear: Any, name: str) -> Any:
    dim, rank = ALONG[name], dist.get_rank()
    kind = {"embed": Words, "o": Row, "down": Row}.get(name, Column)
    weight = linear.weight.detach().chunk(RANKS, dim)[rank].clone()
    options = {} if name == "embed" else {"bias": linear.bias is not None}
    made: Any = kind(weight.shape[1], weight.shape[0], **options) if name != "embed" else kind(*weight.shape)
    made.weight = nn.Parameter(weight)
    if getattr(linear, "bias", None) is not None:
        bias = linear.bias.detach()
        made.bias = nn.Parameter((bias.chunk(RANKS)[rank] if dim == 0 else bias).clone())
    return made


def split_model(sizes: Sizes) -> Any:
    """This rank's part of the GPT."""
    made: Any = model(sizes)
    made.embed, made.head = _part(made.embed, "embed"), _part(made.head, "head")
    for block in made.blocks.values():
        for owner, names in ((block.attention, "qkvo"), (block, ("up", "down"))):
            for name in names:
                setattr(owner, name, _part(getattr(owner, name), name))
    return made


def parts(name: str, tensor: Tensor) -> tuple[int, int, int] | None:
    """Which part of a tensor this rank has."""
    *_, owner, kind = name.split(".")
    dim = ALONG.get(owner)
    if dim is None or (kind == "bias" and dim == 1):
        return None
    return (0 if kind == "bias" else dim), dist.get_rank(), RANKS


def run(folder: str, fault: str = "", sizes: Sizes = SIZES) -> None:
    """A recorded run on this rank, with label smoothing if the fault is one of it."""
    made = split_model(sizes)
    smoothing = 0.1 if fault in ("local vocabulary", "smoothing") else 0.0
    made.embed.fault = fault
    if fault in ("bias twice", "no sum"):
        made.blocks["1"].down.fault = fault
    if fault == "scattered in another order":
        made.blocks["2"].ln2 = Scattered(made.blocks["2"].ln2)
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    words, labels = batches(sizes)
    with record(Path(folder), made, parts=parts):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(made(words[step]), labels[step], tokens_of(labels[step]), smoothing, fault).backward()
            optimizer.step()
