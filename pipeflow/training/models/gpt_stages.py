"""Pipeline stages of a GPT: which rank holds which stage, initial weights, and tied weights.

A rank creates only its own stages: first on torch's meta device, then on its own device with initial weights. So the
whole model never has to fit on one rank. Must not contain: the model itself, or how it is trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.partition import partition_uniform
from pipeflow.core.placement import Placement
from pipeflow.engine.parallel.context import current_context
from pipeflow.engine.runtime.gradients.ties import PipelineSharedModuleWrapper
from pipeflow.engine.tensor.random import initialize_
from pipeflow.training.models.gpt import GPTStage


def build_stage(
    start: int,
    end: int,
    num_layers: int,
    *,
    first: bool,
    last: bool,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **options: Any,
) -> GPTStage:
    """Makes the stage with blocks [start, end) of a GPT, and allocates nothing else. A stage that is first and last
    ties its token embedding to its head; `tie` ties those of two stages.

    Args:
        start: index of its first block.
        end: index after its last block.
        num_layers: number of blocks of the whole model.
        first: whether this is the first stage.
        last: whether this is the last stage.
        seed: seed of the initial weights.
        device: device of the weights; "meta" allocates no memory.
        options: further arguments of GPTStage.
    """
    with torch.device("meta"):
        stage = GPTStage(end - start, first=first, last=last, start=start, **options)
    begin(stage, num_layers, seed=seed, device=device)
    return stage


def begin(
    stage: GPTStage,
    num_layers: int,
    *,
    seed: int,
    device: torch.device | str,
    std: float = 0.02,
    tied: bool = True,
) -> None:
    """Moves a stage from the meta device to `device` and gives it initial weights. If it is first and last, its token
    embedding and head share one weight, unless `tied` is False. On "meta" it stays without memory.
    """
    if torch.device(device).type != "meta":
        stage.to_empty(device=device)
        initialize(stage, num_layers, seed, std=std, tied=tied)
    if tied and stage.embedding is not None and stage.head is not None:
        stage.head.weight = stage.embedding.word_embeddings.weight


def initialize(stage: GPTStage, num_layers: int, seed: int, *, std: float = 0.02, tied: bool = True) -> None:
    """Gives a stage GPT-2's initial weights. Each depends only on `seed` and on the weight's name in the whole model.
    If `tied`, embedding and head get the same weights.
    """

    def fill(name: str, block: Tensor, generator: torch.Generator) -> None:
        if name.endswith("bias"):
            block.zero_()
        elif block.dim() == 1:
            block.fill_(1)  # weight of a norm
        else:
            residual = name.endswith("output.weight")  # two of a layer add to the residual stream
            block.normal_(0, std / (2 * num_layers) ** 0.5 if residual else std, generator=generator)

    for name, part in stage.named_children():
        prefix = "embedding.word_embeddings" if name == "head" and tied else name
        initialize_(part, fill, seed=seed, prefix=prefix)


def build_gpt_pipeline(
    num_layers: int,
    num_chunks: int = 1,
    device: torch.device | str | None = None,
    *,
    placement: Placement | None = None,
    **options: Any,
) -> nn.Module:
    """Makes this rank's stages of a GPT. Returns a module, or an nn.ModuleList in chunk order if there are several. The
    token embedding of the first stage and the head of the last are tied.

    Args:
        num_layers: number of blocks of the whole model.
        num_chunks: number of stages per rank.
        device: device of the weights; by default the rank's own. On "meta" weights have no memory.
        placement: the schedule's placement; by default stage s is on rank s modulo the number of ranks.
        options: further arguments of GPTStage, and the `seed` of the weights.
    """
    context = current_context()
    if placement is None:
        placement = Placement.looped(context.pipeline_size, num_chunks)
    parts = [part for [part] in partition_uniform(num_layers, placement.num_stages)]
    stages = [
        build_stage(
            *parts[stage],
            num_layers,
            first=stage == 0,
            last=stage == placement.num_stages - 1,
            device=context.device if device is None else device,
            **options,
        )
        for stage in placement.stages_of(context.pipeline_rank)
    ]
    tie(stages, placement)
    return stages[0] if len(stages) == 1 else nn.ModuleList(stages)


def tie(stages: Iterable[GPTStage], placement: Placement) -> None:
    """Ties the token embedding of the first stage to the head of the last, also if both are on one rank."""
    ranks = [*placement.ranks_of(0), *placement.ranks_of(placement.num_stages - 1)]
    wrapper = PipelineSharedModuleWrapper(ranks)
    for stage in stages:
        for table in stage.word_tables:
            wrapper.register_module(table)
