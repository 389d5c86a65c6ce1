"""DistributedDataParallel over two replicas with two accumulations, in float32 or bfloat16: faults of loops, samplers,
optimizers and their schedules.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.checked.llama import RATE, SIZES, STEPS, Sizes, batches, count, model, optimizer_of, total_loss
from pipeflow.checking import record

RANKS, ACCUMULATED = 2, 2


def run(folder: str, fault: str = "", sizes: Sizes = SIZES, clip: float | None = None, warm: bool = False) -> None:
    """A recorded run on this rank."""
    rank = dist.get_rank()
    made: Any = model(sizes if fault != "other eps" else Sizes(eps=3e-2))
    wrapped = DistributedDataParallel(made)
    optimizer = optimizer_of(made, on_norms=fault == "decayed norms")
    words, labels = batches(sizes)
    if fault == "unshifted labels":
        labels = torch.where(labels == -100, labels, words)
    kept = _cached(made.layers["1"].feed.w1) if fault == "cached weight" else None
    with record(Path(folder), wrapped, optimizer):
        for step in range(STEPS):
            read = 0 if fault == "same epoch" else step
            _set_rates(optimizer, step, warm, fault)
            optimizer.zero_grad()
            mine = slice(rank * sizes.batch // RANKS, (rank + 1) * sizes.batch // RANKS)
            _backwards(wrapped, words[read, mine], labels[read, mine], count(labels[read]), fault)
            if clip is not None:
                _clip(made, clip, fault)
            before = [each.detach().clone() for each in made.parameters()]
            optimizer.step()
            if fault == "stale masters":
                _restore(made, before)
    del kept


def _backwards(wrapped: Any, words: Tensor, labels: Tensor, tokens: Tensor, fault: str) -> None:
    pairs = [*zip(words.chunk(ACCUMULATED), labels.chunk(ACCUMULATED), strict=True)]
    for index, (given, wanted) in enumerate(pairs):
        last = index == ACCUMULATED - 1 and fault != "never synchronized"
        with nullcontext() if last else wrapped.no_sync():
            loss = total_loss(wrapped(given), wanted) * RANKS / tokens
            if fault == "mean of accumulations":
                loss = loss * tokens / (count(wanted) * RANKS * ACCUMULATED)
            if fault == "divided twice":
                loss = loss / ACCUMULATED
            loss.backward()


def _set_rates(optimizer: torch.optim.Optimizer, step: int, warm: bool, fault: str) -> None:
    if warm:
        times = step * (2 if fault == "stepped twice" else 1) + 1
        for group in optimizer.param_groups:
            group["lr"] = RATE * times


def _clip(made: Any, most: float, fault: str) -> None:
    """Clips, or clips each layer by its own norm."""
    owners: list[Any] = (
        [made] if fault != "norm of layers" else [made.embed, *made.layers.values(), made.norm, made.head]
    )
    for owner in owners:
        nn.utils.clip_grad_norm_(owner.parameters(), most)


def _cached(layer: nn.Linear) -> Tensor:
    """The layer goes on with its first weight, as with a copy in another format that is not made again."""
    first = layer.weight.detach().clone()
    layer.forward = lambda values: nn.functional.linear(values, layer.weight - layer.weight.detach() + first)  # type: ignore[method-assign,assignment]  # a fault
    return first


def _restore(made: Any, before: list[Tensor]) -> None:
    """The new values of a layer, which a float32 copy has, do not come to the weights."""
    with torch.no_grad():
        for (name, parameter), old in zip(made.named_parameters(), before, strict=True):
            if name.startswith("layers.2.feed"):
                parameter.copy_(old)
