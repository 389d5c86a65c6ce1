"""torch.distributed.pipelining with several stages on a rank: interleaved 1F1B, and ZBV with divided backwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from benchmarks.checked.llama import SIZES, STEPS, Sizes, batches, count, model, optimizer_of, total_loss
from pipeflow.checking import record

RANKS, MICROBATCHES = 2, 4
PLACES = {"interleaved": ((0, 2), (1, 3)), "zbv": ((0, 3), (1, 2))}


class Rounded(torch.autograd.Function):
    """The values; gradients are rounded to bfloat16 on their way back."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.to(torch.bfloat16).to(gradient.dtype)


def tied(folder: str) -> None:
    """The reference with tied embeddings, on one rank."""
    made = model()
    made.head.weight = made.embed.weight
    optimizer = optimizer_of(made)
    words, labels = batches()
    with record(Path(folder), made):
        for step in range(STEPS):
            optimizer.zero_grad()
            (total_loss(made(words[step]), labels[step]) / count(labels[step])).backward()
            optimizer.step()


def stage_of(index: int, sizes: Sizes, is_tied: bool = False) -> Any:
    """One layer, with the embedding or the head."""
    made: Any = model(sizes)
    if is_tied:
        made.head.weight = nn.Parameter(made.embed.weight.detach().clone())
    for other in range(sizes.layers):
        if other != index:
            del made.layers[str(other)]
    if index:
        made.embed = None
    if index < sizes.layers - 1:
        made.norm = made.head = None
    return made


def run(folder: str, fault: str = "", sizes: Sizes = SIZES, schedule: str = "interleaved") -> None:
    """A recorded run on this rank."""
    rank = dist.get_rank()
    mine = PLACES[schedule][rank]
    made = [stage_of(index, sizes, fault == "no tie") for index in mine]
    if fault == "coarse gradients" and rank == 0:
        made[0].register_forward_hook(lambda _, __, output: Rounded.apply(output))  # type: ignore[no-untyped-call]  # torch's
    if fault == "other order" and schedule == "interleaved":
        _exchange(made, sizes, rank)
    optimizers = [optimizer_of(each) for each in made]
    words, labels = batches(sizes)
    tokens: list[Tensor] = []

    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        return total_loss(logits, wanted) * MICROBATCHES / tokens[-1]

    stages = [
        PipelineStage(each, index, sizes.layers, torch.device("cpu")) for each, index in zip(made, mine, strict=True)
    ]
    kind: Any = ScheduleInterleaved1F1B if schedule == "interleaved" else ScheduleZBVZeroBubble
    pipe = kind(stages, MICROBATCHES, loss_fn=loss, scale_grads=fault != "not divided")
    if fault == "lost half" and rank == 1:
        _lose(stages[0])
    with record(Path(folder), made, optimizers):
        for step in range(STEPS):
            for index, each in zip(mine, optimizers, strict=True):
                if not (fault == "not zeroed" and step and index == 2):
                    each.zero_grad()
            tokens.append(count(labels[step]))
            target: dict[str, Any] = {"target": labels[step]} if sizes.layers - 1 in mine else {}
            pipe.step(*[words[step]] if 0 in mine else [], **target)
            for each in optimizers:
                each.step()


def _exchange(made: list[nn.Module], sizes: Sizes, rank: int) -> None:
    """The second stages of both ranks have each other's layers, under the names that they should have."""
    whole: Any = model(sizes)
    theirs, mine = ("3", "2") if rank == 0 else ("2", "3")
    stage: Any = made[1]
    stage.layers[mine].load_state_dict(whole.layers[theirs].state_dict())


def _lose(stage: Any) -> None:
    """The second half of a backward, for weights, is not run for one microbatch."""
    original = stage.backward_weight_one_chunk

    def weights(bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        before = {name: each.grad.clone() for name, each in stage.submod.named_parameters() if each.grad is not None}
        original(bwd_chunk_id, *arguments, **named)
        if bwd_chunk_id == 2:
            for name, parameter in stage.submod.named_parameters():
                parameter.grad.copy_(before[name])

    stage.backward_weight_one_chunk = weights
