"""A GPT over a pipeline: which rank holds what, and which of it is one weight.

A rank makes its own stages alone, first without memory (torch's meta device), then on its device with their first
weights; so no model is too big to begin with. What is not here: the model itself, and how it is trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipeflow.core.placement import Placement
from pipeflow.models.gpt import GPTStage
from pipeflow.parallel.context import current_context
from pipeflow.planning.partition import partition_uniform
from pipeflow.runtime.gradients.ties import PipelineSharedModuleWrapper
from pipeflow.tensor.initialize import initialize_


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
    """The stage with blocks [start, end) of `num_layers`, nothing else allocated; `options` are GPTStage's.

    One that is first and last ties its two word tables; two stages are tied by `tie`.
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
    """Gives a stage that is on the meta device memory on `device`, and its first weights; where it is first and last,
    its two word tables become one weight unless they are not `tied`. On "meta" it stays without memory.
    """
    if torch.device(device).type != "meta":
        stage.to_empty(device=device)
        initialize(stage, num_layers, seed, std=std, tied=tied)
    if tied and stage.embedding is not None and stage.head is not None:
        stage.head.weight = stage.embedding.word_embeddings.weight


def initialize(stage: GPTStage, num_layers: int, seed: int, *, std: float = 0.02, tied: bool = True) -> None:
    """Gives a stage its first weights: GPT-2's, each drawn from `seed` and from its name in the whole model alone. Tied
    word tables begin alike.
    """

    def fill(name: str, block: Tensor, generator: torch.Generator) -> None:
        if name.endswith("bias"):
            block.zero_()
        elif block.dim() == 1:
            block.fill_(1)  # of a norm
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
    """This rank's stages of a GPT, in chunk order: a module, or an nn.ModuleList when there are several. The first
    stage's word table and the last one's head are tied, wherever in the pipeline they are.

    Args:
        num_layers: of the whole model.
        num_chunks: stages a rank.
        device: where; the rank's own unless given. On "meta" weights have shapes and no memory.
        placement: of the schedule; unless given, stages are dealt to the ranks in turn.
        options: GPTStage's, and the `seed` of the weights.
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
    """Makes the word tables of the first and the last stage one weight, also where both are on one rank."""
    ranks = [*placement.ranks_of(0), *placement.ranks_of(placement.num_stages - 1)]
    wrapper = PipelineSharedModuleWrapper(ranks)
    for stage in stages:
        for table in stage.word_tables:
            wrapper.register_module(table)
