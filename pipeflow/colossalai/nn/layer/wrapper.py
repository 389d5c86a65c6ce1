"""ColossalAI's `colossalai.nn.layer.wrapper`."""

from __future__ import annotations

from pipeflow.runtime.gradients.ties import PipelineSharedModuleWrapper

__all__ = ["PipelineSharedModuleWrapper"]
