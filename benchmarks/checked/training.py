"""Two replicas by hand, whose gradients are added up: faults of loss scaling, averages of weights, losses, groups of an
optimizer, and of resuming. On one rank it is the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn

from benchmarks.checked.llama import RATE, SIZES, STEPS, Feed, Sizes, batches, count, model, optimizer_of
from pipeflow.checking import record

RANKS, ACCUMULATED, FROZEN = 2, 2, "layers.1.feed.w1.weight"


class Activation(torch.autograd.Function):
    """SiLU; the gradient lacks a term."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        context.save_for_backward(values)
        found: Tensor = F.silu(values)
        return found

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (values,) = context.saved_tensors
        found: Tensor = gradient * values.sigmoid()
        return found


class Fused(Feed):
    """SwiGLU with an activation of its own."""

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.w2(Activation.apply(self.w1(values)) * self.w3(values))  # type: ignore[no-untyped-call]  # torch's
        return found


def run(folder: str, fault: str = "", kind: str = "", sizes: Sizes = SIZES) -> None:
    """A recorded run on this rank. Kinds: "clipped", "warm" for a rate that rises, "frozen", "smoothed"."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made: Any = model(sizes)
    made.get_parameter(FROZEN).requires_grad_(kind != "frozen" or (fault == "trained on one rank" and rank == 1))
    if fault == "wrong backward":
        made.layers["1"].feed.__class__ = Fused
    optimizer = optimizer_of(made, on_norms=fault == "decay on one rank" and rank == 1)
    scaler = torch.amp.GradScaler("cpu", 1024.0, enabled=fault in ("clipped before unscaling", "not unscaled"))
    words, labels = batches(sizes)
    with record(Path(folder), made):
        for step in range(STEPS):
            if fault == "state not restored" and step:
                optimizer = optimizer_of(made)
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 if kind != "warm" or (fault == "rate on one rank" and rank) else step + 1)
            optimizer.zero_grad()
            mine = slice(rank * sizes.batch // ranks, (rank + 1) * sizes.batch // ranks)
            _backwards(made, words[step, mine], labels[step, mine], count(labels[step]), fault, kind, scaler)
            for parameter in made.parameters():
                if parameter.requires_grad and parameter.grad is not None and fault != "trained on one rank":
                    dist.all_reduce(parameter.grad)
            if fault == "trained on one rank":
                _add_up_common(made)
            before = [each.detach().clone() for each in made.parameters()]
            _step(made, optimizer, scaler, fault, kind)
            if fault == "averaged weights stay" and not step:
                with torch.no_grad():
                    for each, old in zip(made.parameters(), before, strict=True):
                        each.lerp_(old, 0.5)


def _add_up_common(made: Any) -> None:
    """Adds up the gradients of what all ranks train."""
    for name, parameter in made.named_parameters():
        if name != FROZEN:
            dist.all_reduce(parameter.grad)


def _backwards(made: Any, words: Tensor, labels: Tensor, tokens: Tensor, fault: str, kind: str, scaler: Any) -> None:
    pairs = [*zip(words.chunk(ACCUMULATED), labels.chunk(ACCUMULATED), strict=True)]
    for given, wanted in pairs[:-1] if fault == "last microbatch dropped" else pairs:
        logits = made(given)
        if fault == "padded vocabulary":
            logits = F.pad(logits, (0, 16))
        smoothing = 0.1 * (kind == "smoothed" and not (fault == "smoothed on one rank" and dist.get_rank() == 0))
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum", label_smoothing=smoothing)
        scaler.scale(loss / tokens).backward()


def _step(made: nn.Module, optimizer: Any, scaler: Any, fault: str, kind: str) -> None:
    if kind == "clipped":
        if fault != "clipped before unscaling":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(made.parameters(), 0.05)
    if fault == "not unscaled":
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
