"""Models made of pipeflow's layers, for every layout: `gpt` is a GPT, `gpt_stages` builds its pipeline stages."""

from __future__ import annotations

from pipeflow.training.models.gpt import GPTBlock, GPTEmbedding, GPTLMHead, GPTLMLoss, GPTStage
from pipeflow.training.models.gpt_stages import build_gpt_pipeline, build_stage

__all__ = [
    "GPTBlock",
    "GPTEmbedding",
    "GPTLMHead",
    "GPTLMLoss",
    "GPTStage",
    "build_gpt_pipeline",
    "build_stage",
]
