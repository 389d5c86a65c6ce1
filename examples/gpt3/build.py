"""A GPT over a pipeline: which rank holds what, and which of it is one weight.

A rank makes its own stages alone, first without memory (torch's meta device), then on its device with their first
weights; so no model is too big to begin with. What is not here: the model itself, and how it is trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pipeflow
from gpt3.model import PipelineGPTHybrid
from pipeflow.tensor import initialize_


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
) -> PipelineGPTHybrid:
    """The stage with blocks [start, end) of `num_layers`, nothing else allocated; `options` are PipelineGPTHybrid's.

    One that is first and last ties its two word tables; two stages are tied by `tie`.
    """
    with torch.device("meta"):
        stage = PipelineGPTHybrid(end - start, first=first, last=last, start=start, **options)
    if torch.device(device).type != "meta":
        stage.to_empty(device=device)
        initialize(stage, num_layers, seed)
    if stage.embedding is not None and stage.head is not None:
        stage.head.weight = stage.embedding.word_embeddings.weight
    return stage


def initialize(stage: PipelineGPTHybrid, num_layers: int, seed: int) -> None:
    """Gives a stage its first weights: GPT-2's, each drawn from `seed` and from its name in the whole model alone."""

    def fill(name: str, block: Tensor, generator: torch.Generator) -> None:
        if name.endswith("bias"):
            block.zero_()
        elif block.dim() == 1:
            block.fill_(1)  # of a norm
        else:
            residual = name.endswith("output.weight")  # two of a layer add to the residual stream
            block.normal_(0, 0.02 / (2 * num_layers) ** 0.5 if residual else 0.02, generator=generator)

    for name, part in stage.named_children():
        initialize_(part, fill, seed=seed, prefix="embedding.word_embeddings" if name == "head" else name)


def build_gpt_pipeline(
    num_layers: int,
    num_chunks: int = 1,
    device: torch.device | str | None = None,
    *,
    placement: pipeflow.Placement | None = None,
    **options: Any,
) -> nn.Module:
    """This rank's stages of a GPT, in chunk order: a module, or an nn.ModuleList when there are several. The first
    stage's word table and the last one's head are tied, wherever in the pipeline they are.

    Args:
        num_layers: of the whole model.
        num_chunks: stages a rank.
        device: where; the rank's own unless given. On "meta" weights have shapes and no memory.
        placement: of the schedule; unless given, stages are dealt to the ranks in turn.
        options: PipelineGPTHybrid's, and the `seed` of the weights.
    """
    context = pipeflow.current_context()
    if placement is None:
        placement = pipeflow.Placement.looped(context.pipeline_size, num_chunks)
    parts = [part for [part] in pipeflow.partition_uniform(num_layers, placement.num_stages)]
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


def tie(stages: Iterable[PipelineGPTHybrid], placement: pipeflow.Placement) -> None:
    """Makes the word tables of the first and the last stage one weight, also where both are on one rank."""
    ranks = [*placement.ranks_of(0), *placement.ranks_of(placement.num_stages - 1)]
    wrapper = pipeflow.PipelineSharedModuleWrapper(ranks)
    for stage in stages:
        for table in stage.word_tables:
            wrapper.register_module(table)


def options_of(shape: pipeflow.GPT) -> dict[str, Any]:
    """A model's sizes, as PipelineGPTHybrid names them."""
    return {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "mlp_ratio": shape.mlp_ratio,
    }


@dataclass(frozen=True)
class Preset:
    """A GPT of a known size, built over the pipeline when it is called."""

    shape: pipeflow.GPT

    def __call__(
        self, num_chunks: int = 1, checkpoint: bool = False, dtype: torch.dtype = torch.float, **options: Any
    ) -> nn.Module:
        """As `build_gpt_pipeline`, whose own `options` these are, and PipelineGPTHybrid's."""
        options = {**options_of(self.shape), "checkpoint": checkpoint, "dtype": dtype, **options}
        return build_gpt_pipeline(self.shape.layers, num_chunks, **options)


GPT_tiny_pipeline_hybrid = Preset(pipeflow.GPT.named("tiny"))
GPT2_small_pipeline_hybrid = Preset(pipeflow.GPT.named("gpt2-small"))
GPT2_medium_pipeline_hybrid = Preset(pipeflow.GPT.named("gpt2-medium"))
GPT2_large_pipeline_hybrid = Preset(pipeflow.GPT.named("gpt2-large"))
GPT2_exlarge_pipeline_hybrid = Preset(pipeflow.GPT.named("gpt2-xl"))
GPT2_8B = Preset(pipeflow.GPT.named("gpt2-8b"))
GPT2_10B = Preset(pipeflow.GPT.named("gpt2-10b"))
GPT3_pipeline_hybrid = Preset(pipeflow.GPT.named("gpt3"))

PRESETS = {name: value for name, value in list(globals().items()) if isinstance(value, Preset)}
