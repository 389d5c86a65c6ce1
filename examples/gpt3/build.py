"""Sizes of GPTs, from `tiny` to GPT-3 (175 billion weights); calling one builds this rank's stages. Must not contain:
the model, or which rank holds which stage; both are in `pipeflow.models`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import pipeflow
from pipeflow.models import build_gpt_pipeline, build_stage

__all__ = ["PRESETS", "Preset", "build_gpt_pipeline", "build_stage", "options_of"]


def options_of(shape: pipeflow.GPT) -> dict[str, Any]:
    """A model's sizes under the names of PipelineGPTHybrid's arguments."""
    return {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "mlp_ratio": shape.mlp_ratio,
    }


def is_plain(shape: pipeflow.GPT) -> bool:
    """Whether a shape is that of GPT-2 and GPT-3, which is the one that is built here: no LLaMA, for example."""
    try:
        return shape == pipeflow.GPT(shape.layers, shape.hidden, shape.heads, shape.positions, shape.vocabulary)
    except pipeflow.UsageError:  # heads whose width is given, and does not follow from the hidden size
        return False


@dataclass(frozen=True)
class Preset:
    """A GPT of a known size; calling it builds this rank's stages."""

    shape: pipeflow.GPT

    def __call__(
        self, num_chunks: int = 1, checkpoint: bool = False, dtype: torch.dtype = torch.float, **options: Any
    ) -> nn.Module:
        """Calls `build_gpt_pipeline`; `options` are its own and PipelineGPTHybrid's."""
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
