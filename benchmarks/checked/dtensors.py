"""DTensor: torch's tensor parallelism of two ranks, with a sequence that is divided around the norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from benchmarks.checked.gpt import RATE, SIZES, STEPS, Sizes, batches, mean_loss, model, tokens_of
from pipeflow.checking import record

RANKS = 2
PLAN = {"attention.q": 0, "attention.k": 0, "attention.v": 0, "attention.o": 1, "up": 0, "down": 1}


def run(folder: str, fault: str = "", sizes: Sizes = SIZES, clip: float | None = None) -> None:
    """A recorded run on this rank."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    made: Any = model(sizes)
    for block in made.blocks.values():
        styles: dict[str, ParallelStyle] = {
            name: RowwiseParallel() if dim else ColwiseParallel() for name, dim in PLAN.items()
        }
        parallelize_module(block, mesh, styles)
    if fault == "swapped gather":
        made.blocks["1"].attention.register_forward_hook(lambda _, __, output: output.roll(output.shape[-1] // 2, -1))
    if fault == "sum for a mean":
        made.blocks["2"].down.register_forward_hook(lambda _, __, output: output * RANKS)
    optimizer = torch.optim.AdamW(made.parameters(), RATE)
    words, labels = batches(sizes)
    with record(Path(folder), made):
        for step in range(STEPS):
            optimizer.zero_grad()
            mean_loss(made(words[step]), labels[step], tokens_of(labels[step])).backward()
            _spoil(made, mesh, fault)
            if clip is not None:
                _clip(made, mesh, clip, fault)
            optimizer.step()


def _spoil(made: Any, mesh: Any, fault: str) -> None:
    """Gradients of a norm of which each rank computed the terms of its own part of the sequence."""
    rank = mesh.get_local_rank()
    if fault == "norm not summed":
        for parameter in (made.blocks["1"].ln2.weight, made.blocks["1"].ln2.bias):
            share = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(3))
            parameter.grad *= share if rank else 1.0 - share
    if fault == "router not summed":
        made.blocks["3"].ln1.weight.grad *= 0.25 if rank else 0.75


def _clip(made: nn.Module, mesh: Any, most: float, fault: str) -> None:
    """Clips by the norm of all gradients."""
    squares = torch.zeros(())
    for name, parameter in made.named_parameters():
        gradient: Tensor = parameter.grad  # type: ignore[assignment]  # it has one
        if fault == "left out of the norm" and "attention.q" in name:
            continue
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        is_part = isinstance(gradient, DTensor) and gradient.placements[0].is_shard()
        times = 1.0 if is_part or fault == "counted twice" else 1.0 / RANKS
        squares += times * own.square().sum()
    torch.distributed.all_reduce(squares, group=mesh.get_group())
    factor = min(1.0, most / float(squares.sqrt()))
    for parameter in made.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor
