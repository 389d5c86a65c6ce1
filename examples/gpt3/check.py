"""--check: trains the whole model on rank 0 alone, without pipeline, tensor ranks and replicas, and compares. Training
itself does not need this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

import pipeflow
from gpt3.build import build_stage, options_of
from gpt3.model import GPTLMLoss, make_optimizer
from pipeflow.parallel.sharding import Split, splits_of
from pipeflow.testing import run_threads

TOLERANCE = 1e-9
DEADLINE = 24 * 3600.0  # seconds

Batches = Iterator[tuple[dict[str, Tensor], Tensor]]
Part = tuple[Tensor, Split | None]


def check(
    stages: nn.Module,
    losses: list[float],
    batches: Batches,
    arguments: argparse.Namespace,
    context: pipeflow.Context,
    console: Console,
) -> None:
    """On rank 0, repeats the training of `stages`, which gave `losses`, and shows the largest difference. Exits with an
    error if that is more than rounding. `batches` are the whole batches of all replicas.
    """
    weights = gather_weights(stages, context)
    if not weights:
        return
    # On a thread that is its own world, although this process is a rank of another one.
    [(plain_losses, plain_weights)] = run_threads(train_in_one_piece, 1, batches, arguments, deadline=DEADLINE)
    loss = max(abs(one - other) for one, other in zip(losses, plain_losses, strict=True))
    weight = max(float((weights[name] - value).abs().max()) for name, value in plain_weights.items())
    console.print(f"\nlargest difference from the model in one piece: loss {loss:.1e}, weights {weight:.1e}")
    if not max(loss, weight) <= TOLERANCE:
        sys.exit(f"train.py: that is more than {TOLERANCE:.0e}")


def gather_weights(stages: nn.Module, context: pipeflow.Context) -> dict[str, Tensor]:
    """The whole weights of all ranks on rank 0, nothing on other ranks. Names do not depend on the cut."""
    mine = parts_of(stages)
    everyone: list[dict[str, Part]] = [mine]
    if dist.is_initialized():
        everyone = [{}] * context.world_size
        dist.gather_object(mine, everyone if context.rank == 0 else None)
    if context.rank > 0:
        return {}
    size = context.tensor_size
    groups = [everyone[first : first + size] for first in range(0, context.world_size, size)]
    return {name: whole([parts[name] for parts in group]) for group in groups for name in group[0]}


def parts_of(stages: nn.Module) -> dict[str, Part]:
    """This rank's part of each weight, and how the weight is split over the tensor ranks."""
    splits = splits_of(stages)
    each = stages if isinstance(stages, nn.ModuleList) else [stages]
    return {
        name: (parameter.detach().cpu(), splits.get(id(parameter)))
        for stage in each
        for name, parameter in stage.named_parameters(remove_duplicate=False)
    }


def whole(parts: list[Part]) -> Tensor:
    """The whole weight, joined from the tensor ranks' parts."""
    value, split = parts[0]
    if split is None:
        return value
    joined: Tensor = split.joined([part for part, _ in parts])
    return joined


def train_in_one_piece(batches: Batches, arguments: argparse.Namespace) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of plain torch, accumulating over the same number of microbatches."""
    shape, losses, criterion = arguments.shape, [], GPTLMLoss()
    model = build_stage(
        0,
        shape.layers,
        shape.layers,
        first=True,
        last=True,
        seed=arguments.seed,
        dtype=torch.float64,
        **options_of(shape),
    )
    optimizer, rate = make_optimizer(model.parameters(), arguments.lr, arguments.steps)
    for _ in range(arguments.steps):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        losses.append(0.0)
        pieces = (each.tensor_split(arguments.microbatches) for each in (inputs["input_ids"], labels))
        for ids, wanted in zip(*pieces, strict=True):
            loss = criterion(model(input_ids=ids), wanted) * len(ids) / len(labels)
            loss.backward()
            losses[-1] += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return losses, model.state_dict()
