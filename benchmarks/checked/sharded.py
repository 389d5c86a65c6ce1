"""FSDP2: `fully_shard` over two replicas, each with half of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from benchmarks.checked.gpt import RATE, SIZES, STEPS, Sizes, batches, mean_loss, model, tokens_of
from pipeflow.checking import record

RANKS = 2


def run(folder: str, fault: str = "", sizes: Sizes = SIZES, clip: float | None = None) -> None:
    """A recorded run on this rank."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",))
    made: Any = model(sizes)
    if fault == "coarse layer":
        made.blocks["1"].ln1.register_forward_hook(lambda _, __, output: output.to(torch.bfloat16).float())
    for block in made.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    left_out = [each for name, each in made.named_parameters() if fault == "left out" and "blocks.3.up" in name]
    optimizer = torch.optim.AdamW(
        [each for each in made.parameters() if all(each is not one for one in left_out)], RATE
    )
    last: dict[str, Tensor] = {}
    words, labels = batches(sizes)
    with record(Path(folder), made, optimizer):
        for step in range(STEPS):
            mine = slice(rank * sizes.batch // RANKS, (rank + 1) * sizes.batch // RANKS)
            optimizer.zero_grad()
            scale = 1.0 if fault == "mean for a sum" else float(RANKS)  # the gradients are averaged
            tokens = tokens_of(labels[step, mine]) * RANKS if fault == "local tokens" else tokens_of(labels[step])
            (scale * mean_loss(made(words[step, mine]), labels[step, mine], tokens)).backward()
            if fault == "stale":
                _stale(made, last)
            if clip is not None:
                nn.utils.clip_grad_norm_(made.parameters(), clip)
            optimizer.step()


def _stale(made: nn.Module, last: dict[str, Tensor]) -> None:
    """Gradients of a layer that are those of the step before."""
    for name, parameter in made.named_parameters():
        if "blocks.2.down" in name:
            gradient: Any = parameter.grad
            now = gradient.to_local().clone()
            gradient.to_local().copy_(last.get(name, now))
            last[name] = now


def run_flat(folder: str, with_originals: bool) -> None:
    """The same under FullyShardedDataParallel, FSDP1."""
    rank = dist.get_rank()
    made = FullyShardedDataParallel(model(SIZES), use_orig_params=with_originals, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    words, labels = batches(SIZES)
    with record(Path(folder), made, optimizer):
        for step in range(STEPS):
            mine = slice(rank * SIZES.batch // RANKS, (rank + 1) * SIZES.batch // RANKS)
            optimizer.zero_grad()
            (RANKS * mean_loss(made(words[step, mine]), labels[step, mine], tokens_of(labels[step]))).backward()
            optimizer.step()
