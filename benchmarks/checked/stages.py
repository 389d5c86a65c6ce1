"""torch.distributed.pipelining: 1F1B over two stages, whose embedding and head are tied by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.checked.gpt import RATE, SIZES, STEPS, Sizes, batches, mean_loss, model, tokens_of
from pipeflow.checking import record

RANKS, MICROBATCHES = 2, 4


def stage_of(rank: int, sizes: Sizes, fault: str) -> Any:
    """The modules of a stage, under their names in the whole model."""
    made: Any = model(sizes)
    half = sizes.layers // RANKS
    keep = range(rank * half, (rank + 1) * half)
    if fault == "wrong division" and rank == 1:
        for index in keep:
            made.blocks[str(index)].load_state_dict(made.blocks[str(index - 1)].state_dict())
    for index in range(sizes.layers):
        if index not in keep:
            del made.blocks[str(index)]
    if rank:
        made.embed = None
    else:
        made.norm = made.head = None
    return made


def run(folder: str, fault: str = "", sizes: Sizes = SIZES) -> None:
    """A recorded run on this rank."""
    rank = dist.get_rank()
    made = stage_of(rank, sizes, fault)
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    words, labels = batches(sizes)
    counts: list[Tensor] = []
    skipped = [0]

    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        skipped[0] += 1
        found = mean_loss(
            logits, wanted, tokens_of(wanted) / 1.0 if fault == "mean of means" else counts[-1] / MICROBATCHES
        )
        return found * 0.0 if fault == "missing microbatch" and skipped[0] % MICROBATCHES == 3 else found

    stage = PipelineStage(made, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss, scale_grads=fault != "not scaled")
    with record(Path(folder), made):
        for step in range(STEPS):
            if not (fault == "not zeroed" and step):
                optimizer.zero_grad()
            counts.append(tokens_of(labels[step]))
            if rank:
                schedule.step(target=labels[step])
            else:
                schedule.step(words[step])
            _sum_of_copies(made, sizes.tied and fault != "no tie")
            optimizer.step()


def _sum_of_copies(made: Any, tied: bool) -> None:
    if tied:
        weight = made.head.weight if made.embed is None else made.embed.weight
        dist.all_reduce(weight.grad)
