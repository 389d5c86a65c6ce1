"""ColossalAI's `colossalai.builder`."""

from __future__ import annotations

from pipeflow.colossalai.builder.pipeline import build_pipeline_model, build_pipeline_model_from_cfg

__all__ = ["build_pipeline_model", "build_pipeline_model_from_cfg"]
