"""--check: takes a few steps in float64 without dropout, under the configured layout and on one process in plain torch,
and compares. Training itself does not need this file.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt3.check import gather_weights
from gpt3.plan import PlanHook
from pipeflow.testing import run_threads
from pipeflow.training import (
    Config,
    Hook,
    MixedLabels,
    Mixup,
    MixupLoss,
    Step,
    Trainer,
    get_dataloader,
    get_dist_logger,
    launch_from_config,
    make_engine,
)
from vit.build import build_pipeline_vit, build_stage
from vit.data import Images
from vit.options import make_optimizer, model_options

STEPS = 20
TOLERANCE = 1e-9
DEADLINE = 3600.0  # seconds

Batch = tuple[Tensor, MixedLabels]


class Losses(Hook):
    """Stores the loss of every step."""

    def __init__(self) -> None:
        self.each: list[float] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.each.append(float(step.loss))


def check(config: Config, images: Images, device: str | None = None) -> None:
    """Trains in both ways, the second one on rank 0 only, and shows the largest difference of losses and weights. Exits
    with an error if it is more than rounding.
    """
    config, losses = replace(config, precision=None, tensor_shape=None), Losses()
    context = launch_from_config(config, device=device)
    mixup = Mixup(config.given.get("MIXUP_ALPHA", 0.0))
    loader = get_dataloader(images.train, config.BATCH_SIZE, shuffle=True, drop_last=True, collate_fn=mixup)
    steps = min(STEPS, len(loader) // config.gradient_accumulation)
    batches = [(pixels.double(), labels) for pixels, labels in islice(loader, steps * config.gradient_accumulation)]
    model = build_pipeline_vit(config.DEPTH, config.num_chunks or 1, **exact_options(config))
    optimizer, scheduler = make_optimizer(model.parameters(), config, steps)
    engine = make_engine(model, optimizer, MixupLoss(nn.CrossEntropyLoss), scheduler=scheduler, config=config)
    plan = PlanHook()
    Trainer(engine, [losses, plan]).fit(batches, 1)
    plan.tell(engine.model)

    read = batches if context.rank == context.layout.replica_ranks(context.rank)[0] else []
    everyone: list[list[Batch]] = [read]
    if dist.is_initialized():
        everyone = [[] for _ in range(context.world_size)]
        dist.gather_object(read, everyone if context.rank == 0 else None)
    weights = gather_weights(model, context)
    if context.rank > 0:
        return
    # On a thread that is its own world, although this process is a rank of another one.
    replicas = [each for each in everyone if each]
    [(plain_losses, plain_weights)] = run_threads(train_in_one_piece, 1, config, replicas, deadline=DEADLINE)
    loss = max(abs(one - other) for one, other in zip(losses.each, plain_losses, strict=True))
    weight = max(float((weights[name] - value).abs().max()) for name, value in plain_weights.items())
    get_dist_logger().info(
        f"largest difference from one process in {steps} steps: loss {loss:.1e}, weights {weight:.1e}"
    )
    if not max(loss, weight) <= TOLERANCE:
        sys.exit(f"train.py: that is more than {TOLERANCE:.0e}")


def exact_options(config: Config) -> dict[str, Any]:
    """Options of a model in float64 without dropout."""
    return {**model_options(config), "dropout": 0.0, "drop_path": 0.0, "dtype": torch.float64}


def train_in_one_piece(config: Config, replicas: list[list[Batch]]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of plain torch, for the batches of all replicas."""
    model, losses, criterion = build_stage(**exact_options(config)), [], MixupLoss(nn.CrossEntropyLoss)
    accumulated = config.gradient_accumulation
    steps = len(replicas[0]) // accumulated
    optimizer, scheduler = make_optimizer(model.parameters(), config, steps)
    for step in range(steps):
        optimizer.zero_grad()
        batches = [batch for each in replicas for batch in each[step * accumulated : (step + 1) * accumulated]]
        losses.append(0.0)
        for pixels, labels in batches:
            loss = criterion(model(pixels), labels) / len(batches)
            loss.backward()
            losses[-1] += float(loss.detach())
        if config.clip_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        optimizer.step()
        scheduler.step()
    return losses, model.state_dict()
