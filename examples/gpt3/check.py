"""--check: the model in one piece, trained beside the pipeline without pipeflow. Nothing here is needed to train."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from model import PRESETS, build_stage, make_optimizer, next_token_loss

TOLERANCE = 1e-9


def check(
    stages: nn.ModuleList,
    losses: list[float],
    batches: Iterator[tuple[dict[str, Tensor], Tensor]],
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """On rank 0: repeats the training that gave `losses` and left `stages`, and shows how far apart the two are at
    most. Ends with an error when that is more than rounding.
    """
    weights = gather_weights(stages)
    if not weights:
        return
    plain_losses, plain_weights = train_in_one_piece(batches, arguments)
    loss = max(abs(one - other) for one, other in zip(losses, plain_losses, strict=True))
    weight = max(float((weights[name] - value).abs().max()) for name, value in plain_weights.items())
    console.print(f"\nlargest difference from the model in one piece: loss {loss:.1e}, weights {weight:.1e}")
    if not max(loss, weight) <= TOLERANCE:
        sys.exit(f"train.py: that is more than {TOLERANCE:.0e}")


def gather_weights(stages: nn.ModuleList) -> dict[str, Tensor]:
    """The weights of all ranks on rank 0, else none. They have the same names however the model was cut."""
    mine = {name: value.cpu() for stage in stages for name, value in stage.state_dict().items()}
    if not dist.is_initialized():
        return mine
    everyone: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
    return {name: value for weights in everyone for name, value in weights.items()}


def train_in_one_piece(
    batches: Iterator[tuple[dict[str, Tensor], Tensor]], arguments: argparse.Namespace
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights that plain torch gives, accumulating over the same microbatches."""
    shape, losses = PRESETS[arguments.preset], []
    model = build_stage(shape, 0, shape.layers, seed=arguments.seed, dtype=torch.float64)
    optimizer, rate = make_optimizer(model.parameters(), arguments.lr, arguments.steps)
    for _ in range(arguments.steps):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        losses.append(0.0)
        pieces = (whole.tensor_split(arguments.microbatches) for whole in (inputs["input_ids"], labels))
        for ids, wanted in zip(*pieces, strict=True):
            loss = next_token_loss(model(input_ids=ids), wanted) * len(ids) / len(labels)
            loss.backward()
            losses[-1] += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return losses, model.state_dict()
